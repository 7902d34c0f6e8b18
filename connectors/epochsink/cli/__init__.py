"""The command line: one module for each verb, and how it prints."""
