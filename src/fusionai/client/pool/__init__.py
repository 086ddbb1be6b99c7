"""What both kinds of job need from the pool: the session, trust, replanning, fault reports, local pools."""
