"""The backward pass: kernel, configuration and compilation."""
