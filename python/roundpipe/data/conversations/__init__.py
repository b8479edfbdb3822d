"""Conversations as tokens, of which answers are learnt: by chat templates, marked ones, and none."""
