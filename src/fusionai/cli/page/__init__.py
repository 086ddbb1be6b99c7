"""The broker's page: an overview of the pool in a browser, and what its owner can do there."""
