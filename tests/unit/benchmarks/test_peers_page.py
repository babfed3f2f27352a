"""docs/benchmarks.md, its plots and the README's section come from the results."""

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.peers import page, readme, tables
from benchmarks.peers.loads import LOADS
from benchmarks.peers.results import FILE, Results, Spread, spread

from tests.unit.benchmarks.peers_kit import results


def test_the_page_the_plots_and_the_readme_are_up_to_date() -> None:
    """All of them exist as soon as there are results."""
    assert page.PAGE.exists() == FILE.exists()
    if FILE.exists():
        found, hint = Results.read(FILE), "run: python -m benchmarks.peers.page"
        assert page.PAGE.read_text() == page.text(found), hint
        for name, drawing in page.drawings(found).items():
            assert (page.IMAGES / f"benchmarks-{name}.svg").read_text() == drawing, hint
        text = page.README.read_text()
        assert readme.text(text, found) == text, hint


def test_results_are_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    results().write(tmp_path / "r.json")
    assert Results.read(tmp_path / "r.json") == results()


def test_figures_are_the_median_round_with_the_lowest_and_the_highest() -> None:
    text = page.text(results())
    assert "| Penstock 1.0 | 1,001 (1,000\u20131,002) |" in text
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert spread([]) is None


def test_a_faster_peer_is_called_faster() -> None:
    listed = (
        page.text(results()).partition("\n## Where a peer is faster\n")[2].partition("\n## ")[0]
    )
    assert "- 64 threads, synchronous sends: NATS JetStream 1.0 (2.00 times as fast)" in listed
    assert "- End to end at 1,000 messages/s: NATS JetStream 1.0 (0.50 times the p99)" in listed
    assert "RocketMQ" not in listed
    section = page.text(results()).partition("### 64 threads, synchronous sends\n")[2]
    section = section.partition("\n## ")[0]
    assert "- NATS JetStream 1.0: 2.00 times the messages per second" in section
    assert "- Apache RocketMQ 1.0: 0.25 times the messages per second" in section


def test_a_difference_within_the_spread_is_marked() -> None:
    made = results()
    made.runs = [run | {"messages": 1000 + 5 * run["round"]} for run in made.runs]
    text = page.text(made)
    assert "- NATS JetStream 1.0: 1.00 times the messages per second (within the spread)" in text


def test_each_figure_has_its_flush_mode_and_copies() -> None:
    for line in page.text(results()).splitlines():
        if line.startswith("| Penstock 1.0 | 1,001"):
            assert "| 1 message per request | async | 1 |" in line
            break
    else:
        raise AssertionError("no row of Penstock")


def test_a_busy_machine_is_mentioned() -> None:
    assert "not final" not in page.text(results())
    made = results()
    made.runs = [run | {"other_s": 1.0} for run in made.runs]
    assert "not final" in page.text(made)


def test_failures_are_listed() -> None:
    assert "## Failures" not in page.text(results())
    made = results()
    error = "no route | for topic"
    made.failures = [{"peer": "nats", "load": "sync-16", "round": 1, "error": error}]
    row = "| NATS JetStream 1.0 | 16 threads, synchronous sends | 2 | `no route \\| for topic` |"
    assert row in page.text(made)


def test_the_section_of_the_readme_is_replaced() -> None:
    old = "# P\n\n## Benchmarks\n\nold | 1 |\n\n## Status\n\nnew\n"
    text = readme.text(old, results())
    assert text.startswith("# P\n\n## Benchmarks\n\n")
    assert text.endswith("\n\n## Status\n\nnew\n")
    assert "old |" not in text
    assert "| messages/s: 64 threads, synchronous | 1,001 | 251 | **2,001** |" in text
    assert "| start with an empty store, s | **0.50** | \u2013 | \u2013 |" in text
    assert readme.text(text, results()) == text


REASONS = """- **It needs less CPU and memory.** Old,
  older.
- **It starts in 9.9 s** and more.
"""


def test_the_reasons_of_the_readme_have_the_figures() -> None:
    made = results()
    assert readme.text(REASONS, made).startswith("- **It needs less CPU and memory.** Old,")
    made.about["memory_after"] = [
        {"peer": "penstock", "anon": 30.0}, {"peer": "apache-5.4.0", "anon": 300.0}
    ]  # fmt: skip
    text = readme.text(REASONS, made)
    assert "uses 9.99 µs" in text
    assert "30.0 MiB of private memory and Apache 300 MiB" in text
    assert text.endswith("\n- **It starts in 0.50 s** and more.\n")


def test_plots_show_every_measured_peer() -> None:
    drawn = page.drawings(results())
    assert set(drawn) == set(page.PLOTS)
    for drawing in drawn.values():
        root = ElementTree.fromstring(drawing)
        texts = ["".join(one.itertext()) for one in root.iter() if one.tag.endswith("text")]
        assert {"Penstock 1.0", "Apache RocketMQ 1.0", "NATS JetStream 1.0"} <= set(texts)
        assert "prefers-color-scheme: dark" in drawing


def test_results_of_no_run_still_make_a_page() -> None:
    made = results()
    made.runs, made.startups = [], []
    assert "## Settings" in page.text(made)
    for drawing in page.drawings(made).values():
        ElementTree.fromstring(drawing)


def test_every_plotted_load_exists() -> None:
    names = {load.name for load in LOADS}
    assert len(names) == len(LOADS)
    assert set(page.SHORT) <= names == set(tables.BY_NAME)
