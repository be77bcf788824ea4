"""HTTP routes, one file an endpoint, and what they share."""
