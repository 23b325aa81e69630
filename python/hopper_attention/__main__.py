"""``python -m hopper_attention``: the command line, as ``hopper-attention`` is."""

from hopper_attention.cli import app

if __name__ == "__main__":
    app(prog_name="hopper-attention")
