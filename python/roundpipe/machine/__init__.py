"""Measures a machine for the planner."""
