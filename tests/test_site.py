"""The documentation builds as a site without a warning, and has every page and every public name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|Users)/")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. In strict mode a warning, such as a link to nowhere, ends the build."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    expected = {re.sub(r"README\.html$", "index.html", page) for page in pages}
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert built == expected | {"404.html"}


def test_the_reference_has_every_public_name(site: Path) -> None:
    import hopper_attention

    text = (site / "reference.html").read_text()
    listed = set(re.findall(r'id="hopper_attention\.(\w+)"', text))
    assert set(hopper_attention.__all__) <= listed
    assert 'id="hopper_attention.integrations.jax.attention.flash_attention"' in text
    assert text.count("Raises:") >= 10  # docstrings are read, and not only names


def test_no_link_leaves_the_site_but_to_the_web(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not MACHINE_PATH.search(text), page
        for target in re.findall(r'href="([^"#?]+)', text):
            if target.startswith(("http", "mailto:", "data:")) or page.name == "404.html":
                continue
            assert (page.parent / target).exists(), (page.name, target)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "",
            "the kernel (`hopper/forward/kernel.py`), `tiles.py`, [here](../limits.md#x), ![p](../results/p.png)",
        ),
        (
            "https://github.com/a/b/",
            "[the kernel](https://github.com/a/b/blob/main/hopper/forward/kernel.py), "
            "[tiles.py](https://github.com/a/b/blob/main/tiles.py), [here](../limits.md#x), ![p](../results/p.png)",
        ),
    ],
)
def test_links_to_the_code(url: str, expected: str) -> None:
    hook = runpy.run_path(str(DOCS / "site_hooks.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="kernels/page.md"))
    code = "\n```python\nx = [a](../../b)\n```\n"
    text = (
        "[the kernel](../../hopper/forward/kernel.py#L3), [tiles.py](../../tiles.py), [here](../limits.md#x), "
        "![p](../results/p.png)"
    )
    assert hook(text + code, page, SimpleNamespace(repo_url=url), None) == expected + code
