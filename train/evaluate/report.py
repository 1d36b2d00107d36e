"""Tables for a person: accepted length and speed by class, acceptance by slot."""

from rich.console import Console
from rich.table import Table

from train.evaluate.classes import DEFINITIONS, MethodFigures
from train.evaluate.run import OVERALL, PLAIN, Evaluation


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Prints both tables, the verdict and the definitions."""
    table = Table(title="Lossless decoding, by class and method")
    for name in ("class", "method"):
        table.add_column(name)
    for name in ("prompts", "tau", "break-even", "tokens/s", "x plain", "draft share", "identical"):
        table.add_column(name, justify="right")
    for class_name, methods in evaluation.figures.items():
        for method, f in methods.items():
            table.add_row(
                class_name,
                method,
                str(evaluation.prompts[class_name]),
                f"{f.tau:.2f}",
                "-" if method == PLAIN else f"{f.break_even_tau:.2f}",
                f"{f.tokens_per_s:.1f}",
                f"{f.speed_ratio:.2f}",
                "-" if method == PLAIN else f"{f.draft_share:.0%}",
                "-" if f.identical is None or method == PLAIN else f"{f.identical:.0%}",
            )
        table.add_section()
    console.print(table)
    _print_slots(evaluation.figures[OVERALL], console)
    for method, f in evaluation.figures[OVERALL].items():
        if method != PLAIN:
            gain = "gain" if f.speed_ratio > 1 else "NO GAIN here"
            console.print(
                f"{method}: {gain}: {f.speed_ratio:.2f} x plain decoding; tau {f.tau:.2f}, "
                f"needed {f.break_even_tau:.2f} on this machine"
            )
    for name, text in DEFINITIONS.items():
        console.print(f"  {name}: {text}", style="dim")


def _print_slots(methods: dict[str, MethodFigures], console: Console) -> None:
    slots = max(len(f.accept_rate) for f in methods.values())
    table = Table(title="Acceptance by slot, all classes")
    table.add_column("method")
    table.add_column("figure")
    for k in range(slots):
        table.add_column(str(k), justify="right")
    for method, f in methods.items():
        if method == PLAIN:
            continue
        for name in ("accept_rate", "survival"):
            values = getattr(f, name)
            table.add_row(method, name, *[f"{v:.2f}" for v in values])
    console.print(table)
