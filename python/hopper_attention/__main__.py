"""``python -m hopper_attention`` and ``hopper-attention``: the command line, which has packages of its own."""

import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line, or say what it lacks."""
    try:
        from hopper_attention.cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED:
            raise
        sys.exit(
            f"hopper-attention: the command line needs {package}, which is not installed here; install it with: "
            "pip install 'hopper-attention[cli]'"
        )
    app(prog_name="hopper-attention")


if __name__ == "__main__":
    main()
