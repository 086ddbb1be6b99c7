"""How a connection to another machine comes about: directly, through NATs, or over the broker's relay."""
