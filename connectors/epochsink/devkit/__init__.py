"""For development: services to test against, and the demo."""
