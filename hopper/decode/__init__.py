"""Attention of few queries on a long cache: keys are shared out over all CTAs, wherever sequences end."""
