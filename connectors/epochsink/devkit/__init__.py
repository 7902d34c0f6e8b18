"""Development tools: services to test against, and the demo."""
