"""The closed set of primitives that derivatives are made of, one file for each with its rules."""
