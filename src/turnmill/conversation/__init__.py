"""What is said: HTTP for workers and agents, branches of a conversation, and its record token by token."""
