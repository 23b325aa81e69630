"""``python -m hopper_attention`` and ``hopper-attention``: the command line, which has packages of its own."""

import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line, or say what it lacks."""
    try:
        from hopper_attention.cli import app
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit(
            f"hopper-attention: the command line needs {error.name}, which is not installed here; install it with: "
            "pip install 'hopper-attention[cli]'"
        )
    app(prog_name="hopper-attention")


if __name__ == "__main__":
    main()
