"""Task services, tasksets, sandboxes, tools and the built-in agent harness. Reaches models over HTTP only."""
