"""The code behind the command line: what it measures, as plain functions that return plain data."""
