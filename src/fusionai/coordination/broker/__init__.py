"""The broker's decisions: members, invitations, leases, jobs and plan versions, as events in a journal."""
