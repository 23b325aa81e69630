"""Whole models: a Llama by Transformers, and a small GPT in training."""
