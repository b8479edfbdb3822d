"""Turns the results of training into folders that other programs load."""
