"""Continual learning: deployed sessions with feedback → filtered → trained on → published if nothing got worse."""
