"""What is done to the service."""
