"""Render the committed reports: the README's results, pages and plots in docs/results, the roofline among them.

python benchmarks/render.py            write them
python benchmarks/render.py --check    fail if the text in the repository is not what the reports give
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hopper_attention.experiments.ablation.plot import plot_ablation
from hopper_attention.experiments.ablation.render import render_page as render_ablation
from hopper_attention.experiments.ablation.render import render_readme as render_ablation_readme
from hopper_attention.experiments.ablation.results import AblationReport, load_ablation
from hopper_attention.experiments.bench.machine import repository_root
from hopper_attention.experiments.bench.plot import plot_forward
from hopper_attention.experiments.bench.render import render_page, splice
from hopper_attention.experiments.bench.results import KINDS, ForwardReport, load_forward
from hopper_attention.experiments.calls import PARTS as CALLS
from hopper_attention.experiments.calls import render_calls
from hopper_attention.experiments.families.page import KIND as FAMILIES_KIND
from hopper_attention.experiments.families.page import render_families
from hopper_attention.experiments.features.plot import plot_features
from hopper_attention.experiments.features.results import FeatureReport, load_features
from hopper_attention.experiments.features.tables import render_features
from hopper_attention.experiments.models.pages import (
    MODELS_KIND,
    TRAINING_KIND,
    render_models,
    render_training,
    ways_of,
)
from hopper_attention.experiments.models.plot import plot_losses, title_of
from hopper_attention.experiments.other_gpu import render_other_gpu
from hopper_attention.experiments.prepass.run import QuantizeReport, load_quantize
from hopper_attention.experiments.prepass.tables import render_quantize
from hopper_attention.experiments.readme import render_speed, render_two_figures
from hopper_attention.experiments.reports import load_figures, write_text
from hopper_attention.experiments.rmse.render import PAGE as ACCURACY_PAGE
from hopper_attention.experiments.rmse.render import render_page as render_accuracy
from hopper_attention.experiments.rmse.render import render_readme as render_accuracy_readme
from hopper_attention.experiments.roofline.render import render_roofline
from hopper_attention.experiments.scaling.plot import plot_scaling
from hopper_attention.experiments.scaling.run import ScalingReport, load_scaling
from hopper_attention.experiments.scaling.tables import render_scaling
from hopper_attention.experiments.serving.plot import plot_serving
from hopper_attention.experiments.serving.results import ServingReport, load_serving
from hopper_attention.experiments.serving.tables import render_serving
from hopper_attention.experiments.timeline.plot import plot_recording
from hopper_attention.experiments.timeline.render import render_timeline
from hopper_attention.experiments.timeline.spec import TimelineReport, load_timeline

GPU = "nvidia_h200"
"""The machine whose reports the README shows."""

OTHER_GPUS = {"nvidia_h100_80gb_hbm3": ("H100", "h100.md")}
"""Others with reports: by the end of their names, what they are called, and their page."""


def read_reports(results: Path) -> list[ForwardReport]:
    """The throughput reports: that of the 16-bit forward, and those of the other kinds that have been committed.

    Raises:
        FileNotFoundError: there is no forward report.
    """
    reports = read_throughput(results, GPU)
    if not reports or reports[0].kind != KINDS[0]:
        raise FileNotFoundError(f"there is no {KINDS[0]}_{GPU}.json in {results}")
    return reports


def read_throughput(results: Path, gpu: str) -> list[ForwardReport]:
    """The throughput reports of a GPU that have been committed."""
    paths = {kind: results / f"{kind}_{gpu}.json" for kind in KINDS}
    return [
        load_forward(path.read_text(encoding="utf-8"), kind) for kind, path in paths.items() if path.is_file()
    ]


def read_odd_shapes(results: Path) -> list[ForwardReport]:
    """The report of problems beside the grid, if it has been committed."""
    path = results / f"odd_shapes_{GPU}.json"
    return [load_forward(path.read_text(encoding="utf-8"), KINDS[0])] if path.is_file() else []


AMPERE_PAGES = {"forward": "ampere", "backward": "ampere_backward"}
"""The pages of the kernels without WGMMA, by kind of report."""


def read_ampere(results: Path) -> list[ForwardReport]:
    """The reports of the kernels without WGMMA that have been committed."""
    paths = {kind: results / f"ampere_{kind}_{GPU}.json" for kind in AMPERE_PAGES}
    return [
        load_forward(path.read_text(encoding="utf-8"), kind) for kind, path in paths.items() if path.is_file()
    ]


def read_figures(path: Path, kind: str) -> dict[str, Any] | None:
    """A latency or accuracy report; None where none has been committed."""
    return load_figures(path.read_text(encoding="utf-8"), kind) if path.is_file() else None


def read_ablations(results: Path) -> list[AblationReport]:
    """The ablation reports that have been committed, that of the paper's problem first."""
    paths = sorted(results.glob(f"ablation*_{GPU}.json"), key=lambda path: (len(path.name), path.name))
    return [load_ablation(path.read_text(encoding="utf-8")) for path in paths]


def read_scaling(results: Path) -> list[ScalingReport]:
    """The scaling report, if one has been committed."""
    path = results / f"scaling_{GPU}.json"
    return [load_scaling(path.read_text(encoding="utf-8"))] if path.is_file() else []


def read_accuracy(results: Path) -> dict[str, Any] | None:
    """The newest accuracy report of any card: errors are those of the code, on every card the same."""
    found = [read_figures(results / f"rmse_{gpu}.json", "rmse") for gpu in (GPU, *OTHER_GPUS)]
    return max((report for report in found if report), key=lambda report: report["date"], default=None)


def read_prepass(results: Path, gpu: str = GPU) -> list[QuantizeReport]:
    """The report of the FP8 pre-pass, if one has been committed."""
    path = results / f"prepass_{gpu}.json"
    return [load_quantize(path.read_text(encoding="utf-8"))] if path.is_file() else []


def read_features(results: Path, gpu: str = GPU) -> list[FeatureReport]:
    """The report of what models use beyond dense attention, if one has been committed."""
    path = results / f"features_{gpu}.json"
    return [load_features(path.read_text(encoding="utf-8"))] if path.is_file() else []


def read_serving(results: Path, gpu: str = GPU) -> list[ServingReport]:
    """The report of attention on a key/value cache, if one has been committed."""
    path = results / f"serving_{gpu}.json"
    return [load_serving(path.read_text(encoding="utf-8"))] if path.is_file() else []


def read_others(results: Path, kind: str, gpu: str = GPU) -> list[dict[str, Any]]:
    """A report of this kind whose page takes it as it is, if there is one."""
    report = read_figures(results / f"{kind}_{gpu}.json", kind)
    return [] if report is None else [report]


def read_timeline(results: Path) -> list[TimelineReport]:
    """The recordings of the ablation's kernels, if they have been committed."""
    path = results / f"timeline_{GPU}.json"
    return [load_timeline(path.read_text(encoding="utf-8"))] if path.is_file() else []


def render(root: Path, results: Path) -> dict[Path, str]:
    """The text of every rendered file, by path.

    Raises:
        FileNotFoundError: there is no forward report.
        ValueError: a report is of another kind, or the README lacks its markers.
    """
    reports = read_reports(results)
    latency = read_figures(results / f"latency_{GPU}.json", "latency")
    rmse = read_accuracy(results)
    readme, folder = root / "README.md", root / "docs" / "results"
    text, pages = readme.read_text(encoding="utf-8"), {}
    for report in reports:
        # Latency and accuracy of that page were measured in 16 bits.
        is_forward = report.kind == KINDS[0]
        others = (latency, rmse) if is_forward else (None, None)
        odd = read_odd_shapes(results) if is_forward else []
        page = render_page(report, *others, f"{report.kind}.png", odd)
        pages[folder / f"{report.kind}.md"] = page
    text = splice(text, render_speed(reports), "speed")
    if rmse is not None and "fp8" in rmse:
        pages[folder / ACCURACY_PAGE] = render_accuracy(rmse)
        text = splice(text, render_accuracy_readme(rmse), "accuracy")
    pages[folder / "roofline.md"] = render_roofline(reports)
    for ampere in read_ampere(results):
        page = AMPERE_PAGES[ampere.kind]
        pages[folder / f"{page}.md"] = render_page(ampere, None, None, f"{page}.png")
    ablations = read_ablations(results)
    if ablations:
        figures = [f"{report.slug}.png" for report in ablations]
        timeline_page = "timeline.md" if read_timeline(results) else ""
        two_figures = render_two_figures(reports[0], ablations[0])
        pages[folder / "ablation.md"] = render_ablation(ablations, figures, timeline_page, two_figures)
        text = splice(text, render_ablation_readme(ablations[0], two_figures), "ablation")
    for scaling in read_scaling(results):
        pages[folder / "scaling.md"] = render_scaling(scaling, "scaling.png")
    for features in read_features(results):
        pages[folder / "features.md"] = render_features(features, "features.png")
    for serving in read_serving(results):
        pages[folder / "serving.md"] = render_serving(serving, "serving.png")
    for prepass in read_prepass(results):
        pages[folder / "prepass.md"] = render_quantize(prepass)
    for families in read_others(results, FAMILIES_KIND):
        pages[folder / "fp8_inputs.md"] = render_families(families)
    for models in read_others(results, MODELS_KIND):
        pages[folder / "models.md"] = render_models(models)
    for training in read_others(results, TRAINING_KIND):
        pages[folder / "training.md"] = render_training(training, "training.png")
    calls = {kind: report for kind in CALLS for report in read_others(results, kind)}
    if calls:
        pages[folder / "host_time.md"] = render_calls(calls)
    for timeline in read_timeline(results):
        pages[folder / "timeline.md"] = render_timeline(timeline)
    for gpu, (name, page) in OTHER_GPUS.items():
        found = read_throughput(results, gpu), read_features(results, gpu), read_serving(results, gpu)
        if any(found):
            pages[folder / page] = render_other_gpu(name, *found)
        for prepass in read_prepass(results, gpu):
            pages[folder / f"prepass_{page}"] = render_quantize(prepass)
        for families in read_others(results, FAMILIES_KIND, gpu):
            pages[folder / f"fp8_inputs_{page}"] = render_families(families)
    return {readme: text, **pages}


def draw(root: Path, results: Path) -> Iterator[Path]:
    """Draw the plots of the pages; yields where each lies."""
    folder = root / "docs" / "results"
    for report in read_reports(results):
        yield plot_forward(report, folder / f"{report.kind}.png")
    for ampere in read_ampere(results):
        yield plot_forward(ampere, folder / f"{AMPERE_PAGES[ampere.kind]}.png")
    for ablation in read_ablations(results):
        yield plot_ablation(ablation, folder / f"{ablation.slug}.png")
    for scaling in read_scaling(results):
        yield plot_scaling(scaling, folder / "scaling.png")
    for features in read_features(results):
        yield plot_features(features, folder / "features.png")
    for serving in read_serving(results):
        yield plot_serving(serving, folder / "serving.png")
    for training in read_others(results, TRAINING_KIND):
        yield plot_losses(ways_of(training), title_of(training["options"]), folder / "training.png")
    for timeline in read_timeline(results):
        for recording in timeline.recordings:
            yield plot_recording(timeline, recording, folder)


def stale(texts: dict[Path, str]) -> list[Path]:
    """Files that do not hold the text they should."""
    return [p for p, text in texts.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a text is stale")
    parser.add_argument("--results", type=Path, help="folder of the reports; default: benchmarks/results")
    parser.add_argument(
        "--root", type=Path, default=repository_root(), help="folder with README.md and docs/"
    )
    options = parser.parse_args(arguments)
    results = options.results or options.root / "benchmarks" / "results"
    try:
        texts = render(options.root, results)
    except (FileNotFoundError, json.JSONDecodeError, ValueError) as error:
        print(f"cannot render: {error}", file=sys.stderr)
        return 2
    if options.check:
        differing = stale(texts)
        for path in differing:
            print(f"{path} is not what the reports give; run python benchmarks/render.py", file=sys.stderr)
        return 1 if differing else 0
    for path, text in texts.items():
        write_text(path, text)
        print(f"wrote {path}")
    for plot in draw(options.root, results):
        print(f"wrote {plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
