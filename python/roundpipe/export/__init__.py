"""Turning what training leaves behind into folders that other programs load."""
