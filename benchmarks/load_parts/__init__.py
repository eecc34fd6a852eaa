"""What the load benchmark is made of: a lean HTTP client, the fleet that uses it, the servers, and what must hold."""
