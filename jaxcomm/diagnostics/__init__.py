"""What the communicators of this process, and of all processes together, are doing."""
