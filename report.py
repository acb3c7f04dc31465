"""Result files become the paper's tables and figures, ours beside the paper's. Reads JSON files only.

    python report.py runs                              what these runs can fill: <scale>/tables.md, <scale>/figures/
    python report.py results --readme README.md        and the results part of README.md
    python report.py runs --scale smoke --only table1 fig-nme
"""
import argparse
import csv
import hashlib
import json
import math
import os
import statistics
import sys
from pathlib import Path

# ------------------------------------------------------------------------------------------------------------------
# The paper's tables. A cell is picked from the runs by its row's and its column's words together:
# data set, strategy, row and label set of result.json, metric (or the task after which), NNCSL's buffer

NAMES = {"cifar100": "CIFAR-100", "tinyimagenet": "Tiny-ImageNet", "imagenet100": "ImageNet100", "cars": "Stanford Cars"}


def pick(strategy, row, **more):
    return {"strategy": strategy, "row": row, **more}


def semi_supervised(dataset, shares, buffers, values):
    """Table 3 or 4: columns are shares of labels; values are the paper's, rows apart by "/", with "-" where it has none."""
    three, ways = ("PFR", "CaSSLe", "POCON"), (("naive", "none"), ("SDC", "sdc"), ("LDC", "ldc"), ("LDC-ridge", "ldc-ridge"))
    rows = [("LwF+NCM", pick("lwf", "none")), ("PASS", pick("pass", "head")), ("PASS", pick("pass", "head")),
            *((f"NNCSL ({n})", pick("nncsl", "head", buffer_size=n)) for n in buffers),
            *((f"{name}+{way}", pick(name.lower(), row)) for way, row in ways for name in three)]
    values = [line.strip() for line in values.split("/")] + [""] * 3  # the last three rows are ours
    columns = [(f"{100 * float(share):g} %", {"labels": share}) for share in (*shares, "1")]
    rows = [(*row, line) for row, line in zip(rows, values)]
    return {"about": {"dataset": dataset}, "columns": columns, "rows": rows, "marks": True}


TABLES = {
    "table1": {
        "caption": "Table 1. Supervised, 10 tasks", "about": {},
        "columns": [(f"{NAMES[d]} {m}", {"dataset": d, "metric": m}) for d in tuple(NAMES)[:3] for m in ("A_last", "A_inc")],
        "rows": [
            ("LwF+NCM", pick("lwf", "none"), "40.5±2.7 56.2±3.6 28.6±1.1 44.2±1.3 44.0±1.9 64.4±0.4"),
            ("LwF+SDC", pick("lwf", "sdc"), "40.6±1.8 56.2±3.0 29.5±0.8 43.8±1.3 42.6±1.9 65.3±0.6"),
            ("PASS", pick("pass", "head"), "37.8±0.2 52.3±0.1 31.2±0.4 45.3±0.7 38.7±0.5 55.5±0.5"),
            ("FeTrIL", pick("fetril", "head"), "37.0±0.6 52.1±0.5 24.4±0.6 38.5±1.1 40.7±0.5 56.3±0.8"),
            ("FeCAM", pick("fecam", "head"), "33.1±0.9 48.1±1.3 24.9±0.5 38.6±1.3 42.4±0.9 57.9±1.5"),
            ("EFC", pick("efc", "head"), "43.6±0.7 58.6±0.9 34.1±0.8 48.0±0.6 47.3±1.4 59.9±1.4"),  # from EFC's paper
            ("LwF+LDC", pick("lwf", "ldc"), "45.4±2.8 59.5±3.9 34.2±0.7 46.8±1.1 51.4±1.2 69.4±0.6"),
            ("LwF+LDC-ridge", pick("lwf", "ldc-ridge"), "")]},
    "table2": {
        "caption": "Table 2. Stanford Cars, pre-trained ViT-B/16, accuracy after task t", "about": {"dataset": "cars"},
        "columns": [(f"t{t}", {"metric": t}) for t in (1, 3, 5, 7, 10)],
        "rows": [
            ("FT+NCM", pick("finetune", "none"), "85.8 73.3 63.2 58.0 53.4"),
            ("FT+SDC", pick("finetune", "sdc"), "85.8 73.5 63.5 57.8 53.3"),
            ("FT+LDC", pick("finetune", "ldc"), "85.8 76.0 71.3 67.0 62.9"),
            ("FT+LDC-ridge", pick("finetune", "ldc-ridge"), "")]},
    "table3": {"caption": "Table 3. Semi-supervised, CIFAR-100, 10 tasks, A_last", **semi_supervised(
        "cifar100", ("0.008", "0.05", "0.25"), (500, 0), """- - - 40.5±2.7 / - - - 37.8±0.2 / 5.91 15.13 15.84 - /
        27.4±0.51 31.4±0.40 35.3±0.30 - / 8.7±0.63 9.0±0.42 9.32±0.39 - /
        20.5±0.44 24.8±0.35 25.7±0.12 - / 19.4±0.57 23.2±0.21 23.6±0.13 - / 20.1±0.23 21.7±0.27 22.4±0.31 - /
        16.2±0.66 22.5±0.57 24.8±0.12 - / 22.1±0.69 25.8±0.09 26.5±0.04 - / 21.8±0.82 25.7±0.23 26.7±0.09 - /
        18.6±0.20 29.3±0.12 33.4±0.06 - / 27.0±0.60 32.8±0.30 35.0±0.21 - / 26.1±0.74 31.1±0.62 33.8±0.25 -""")},
    "table4": {"caption": "Table 4. Semi-supervised, ImageNet100, 10 tasks, A_last", **semi_supervised(
        "imagenet100", ("0.01", "0.05", "0.25"), (5120, 500), """- - - 44.0±1.9 / - - - 38.7±0.5 / 1.76 10.36 23.9 - /
        35.4±0.21 41.6±0.12 47.1±0.08 - / 9.93±0.22 15.1±0.15 16.6±0.1 - /
        19.6±0.16 21.8±0.38 22.0±0.12 - / 25.37±0.27 26.9±0.25 27.36±0.11 - / 24.2±0.32 26.1±0.22 25.8±0.20 - /
        17.2±0.55 19.1±0.16 19.8±0.08 - / 22.2±0.03 25.9±0.23 26.6±0.01 - / 21.8±0.08 25.1±0.30 25.7±0.03 - /
        26.5±0.09 32.4±0.35 33.5±0.07 - / 29.5±0.58 33.9±0.15 35.8±0.39 - / 28.3±0.37 33.2±0.30 34.0±0.28 -""")},
    "table5": {
        "caption": "Table 5. The projector p_F, CIFAR-100, A_last (CaSSLe: 25 % labelled)", "about": {"dataset": "cifar100"},
        "columns": [("Linear", {"row": "ldc"}), ("Linear + bias", {"row": "ldc+bias"}), ("Linear + ReLU", {"row": "ldc+relu"}),
                    ("MLP", {"row": "ldc-mlp"})],
        "rows": [
            ("LwF + LDC", {"strategy": "lwf"}, "45.4±2.8 45.2±3.0 41.2±2.1 43.7±2.3"),
            ("CaSSLe + LDC", {"strategy": "cassle", "labels": "0.25"}, "35.0±0.2 34.3±0.2 29.1±0.5 34.9±0.4")]},
    "table6": {
        "caption": "Table 6. N stored features per class, or the mean of 25 %, CIFAR-100, A_last", "about": {"dataset": "cifar100"},
        "columns": [("Mean", {"labels": "0.25"}), *((f"N={n}", {"labels": f"n{n}"}) for n in (5, 50, 100, 500))],
        "rows": [("CaSSLe + LDC", pick("cassle", "ldc"), "35.0±0.2 21.1±0.01 32.9±0.03 33.9±0.02 35.05±0.04")]},
}


def cells_of(table):
    """(row, column, words that pick the cell, the paper's value; "" in a row of ours) of every cell that is in use."""
    for i, (_, row, paper) in enumerate(table["rows"]):
        for j, ((_, column), value) in enumerate(zip(table["columns"], paper.split() or [""] * len(table["columns"]))):
            if value != "-":
                yield i, j, {"labels": "1", "metric": "A_last", **table["about"], **row, **column}, value


def key_of(dataset, strategy, row, labels, metric, buffer_size=None):
    return dataset, strategy, row, labels, metric, buffer_size


PAPER = {key_of(**words): value for table in TABLES.values() for _, _, words, value in cells_of(table) if value}

# ------------------------------------------------------------------------------------------------------------------
# Runs


def read_json(path):
    """Content of a file that ldc.py wrote, None where there is none or where its digest does not fit, which is said."""
    try:
        content = json.loads(path.read_text())
        digest = content.pop("digest", None)
        if digest == hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest():
            return content
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        pass
    print(f"{path} is damaged and left out; the command that made it makes it again.", file=sys.stderr)
    return None


def load_runs(folder):
    """Every run in <folder>/<data set>/<strategy>/seed<k>, whether finished, unfinished or failed (its reason in failed.json)."""
    runs = []
    for path in sorted(folder.glob("*/*/seed*")):
        failed = read_json(path / "failed.json")
        run = read_json(path / "result.json") or failed
        if run:
            runs.append({"finished": False, "tasks_done": 0, "folder": path, **run, "reason": failed and failed["reason"]})
    return alike(runs)


def alike(runs):
    """Runs of one experiment differ in the seed alone: of several settings the shortest folder name stays, the rest is named."""
    experiments, kept = {}, []
    for run in runs:
        identity = {name: run.get(name) for name in ("tasks", "first_classes", "image_size", "class_list", "limit", "generated")}
        order = None if run["order_seed"] == run["seed"] else run["order_seed"]
        run["identity"] = {**identity, **run["settings"], **run["options"], "order": order}
        experiments.setdefault((run["dataset"], run["strategy"], share_of(run), buffer_of(run)), []).append(run)
    for group in experiments.values():
        first = min(group, key=lambda run: len(run["folder"].parent.name))["identity"]
        for run in group:  # a setting that an older version did not know is no difference
            if all(first[name] == run["identity"][name] for name in first.keys() & run["identity"].keys()):
                kept.append(run)
            else:
                print(f"{run['folder']} is left out: other runs of this experiment have other settings.", file=sys.stderr)
    return kept


def share_of(run):
    """The label set of a strategy that is trained anew for every share of labels, None for the others."""
    return f"{run['settings'].get('label_fraction', 1.0):g}" if run["strategy"] in ("pass", "nncsl") else None


def buffer_of(run):
    return run["settings"]["buffer_size"] if run["strategy"] == "nncsl" else None


def find(runs, dataset, strategy, labels="1", buffer_size=None, **_):
    """All seeds of one experiment."""
    return [r for r in runs if (r["dataset"], r["strategy"], buffer_of(r)) == (dataset, strategy, buffer_size)
            and share_of(r) in (None, labels)]


def number(run, row, labels="1", metric="A_last", **_):
    """One number of a finished run, None where it has none: accuracy after task `metric`, A_last, A_inc, or `distance`."""
    found = run["finished"] and run["rows"].get(labels, {}).get(row)
    if found and metric == "distance":
        return distance_after(run, found, -1) if found["oracle_distance"] else None
    return (found["accuracy"][metric - 1] if isinstance(metric, int) else found[metric]) if found else None


def distance_after(run, row, task):
    """Mean cosine distance to the oracle of the prototypes that were moved, those of classes older than the task (an index)."""
    return statistics.mean(row["oracle_distance"][task][:-run["task_sizes"][task]])


def shares(rows):
    """The label sets that are shares of the labels, each as first drawn; not "n50", not "0.05@7"."""
    return [name for name in rows if name[0] != "n" and "@" not in name]


def by_seed(runs, labels="1", **words):
    """seed -> number, for the finished runs that the words pick; a mean where labels were drawn several times ("0.05@1")."""
    numbers = {}
    for run in find(runs, labels=labels, **words):
        drawn = [number(run, labels=name, **words) for name in run.get("rows", ()) if name.split("@")[0] == labels]
        drawn = [value for value in drawn if value is not None]  # distances are kept for the first draw alone
        if drawn:
            numbers[run["seed"]] = statistics.mean(drawn)
    return dict(sorted(numbers.items()))


# ------------------------------------------------------------------------------------------------------------------
# Tables


def spread(values, digits=1):
    """Mean, and the sample standard deviation where there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def label_text(label_set):
    """Words for a label set: "0.05", "0.05@7" (drawn again with seed 7), "n50" (50 images of each class)."""
    share, _, seed = label_set.partition("@")
    text = f"{share[1:]} labels of each class" if share[0] == "n" else f"{100 * float(share):g} % of the labels"
    return text + (f", draw {seed}" if seed else "")


def aligned(lines, gap):
    """Lines of cells as text, the first column to the left, the others to the right; and the widths of the columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [gap.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines], widths


def markdown(header, rows):
    """A Markdown table whose source can be read too."""
    text, widths = aligned([header, *rows], " | ")
    rule = "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return [f"| {text[0]} |", f"|{rule}|", *(f"| {line} |" for line in text[1:])]


def origin(runs, datasets=tuple(NAMES)):
    """What a caption must say of its runs: that their images were generated."""
    names = sorted({r["dataset"] for r in runs if r.get("generated") and r["dataset"] in datasets})
    return f" **Generated images, not {', '.join(NAMES[n] for n in names)}.**" if names else ""


def cell(runs, words, notes):
    """Mean ± deviation (seeds) of one cell, or why there is none; what is missing of it goes to the notes."""
    numbers, marks, why = by_seed(runs, **words), "", "not run"
    for run in find(runs, **words):
        if not run["finished"]:
            done = f"{run['tasks_done']} of {run['tasks']} tasks"
            note = f"{run['folder']}: " + (f"failed after {done}: {run['reason'].splitlines()[0]}" if run["reason"] else done)
            if note not in notes:
                notes.append(note)
            marks, why = f"{marks} [{notes.index(note) + 1}]", "failed" if run["reason"] else done
        elif run["seed"] not in numbers:
            why = f"no row {words['row']}" if words["labels"] in run["rows"] else f"no labels {words['labels']}"
    return (f"{spread(list(numbers.values()))} ({len(numbers)})" if numbers else why) + marks


def paper_table(table, runs, scale, whole):
    """One table of the paper: under each line of ours the paper's value and the difference; our own rows below.

    Lines and columns in which nothing was run are left out and named, unless the whole table is asked for.
    """
    grid, notes, names = {}, [], [name for name, _ in table["columns"]]
    for i, j, words, paper in cells_of(table):
        numbers = by_seed(runs, **words).values()
        ahead = f"; {statistics.mean(numbers) - float(paper.split('±')[0]):+.1f}" if paper and numbers else ""
        grid[i, j] = cell(runs, words, notes), paper.replace("±", " ± ") + ahead
    run = [place for place, (ours, _) in grid.items() if whole or ours != "not run"]
    columns = [j for j in range(len(names)) if any(j == place[1] for place in run)]
    marks = ["exemplar-free", "semi-sup."] if "marks" in table else []
    header, blocks, missing = ["", *marks, *(names[j] for j in columns)], ([], []), [n for j, n in enumerate(names) if j not in columns]
    for i, (name, words, paper) in enumerate(table["rows"]):
        if not any(i == place[0] for place in run):
            twice = [n for n, _, _ in table["rows"]].count(name) > 1  # PASS with all labels and with few are two rows
            missing.append(f"{name} ({', '.join(names[j] for k, j in grid if k == i)})" if twice else name)
            continue
        ticks = ["no" if words.get("buffer_size") else "yes", "yes" if paper[-1:] in "-" else "no"] if marks else []
        cells = [grid.get((i, j), ("", "")) for j in columns]
        blocks[not paper].append([name, *ticks, *(ours for ours, _ in cells)])
        if paper:
            blocks[0].append(["  paper; ours - paper", *[""] * len(marks), *(theirs for _, theirs in cells)])
    datasets = {words["dataset"] for _, _, words, _ in cells_of(table)}
    text = [f"**{table['caption']}.** Scale {scale}.{origin(runs, datasets)}", "", *markdown(header, blocks[0]), ""]
    text += ["Ours, not in the paper, on the same backbones:", "", *markdown(header, blocks[1]), ""] if blocks[1] else []
    text += [f"Not run: {', '.join(dict.fromkeys(missing))}.", ""] if missing else []
    return text + [f"[{k}] {note}  " for k, note in enumerate(notes, 1)] + [""] * bool(notes)


OURS = ("none", "sdc", "sdc-unit", "adc", "ldc", "ldc-eye", "ldc-ridge", "ldc-ridge+lda", "oracle", "oracle+lda")
PAIRS = (("sdc", "none"), ("ldc", "none"), ("ldc", "sdc"), ("ldc", "ldc-mlp"), ("ldc", "nme-20"), ("oracle", "ldc"), ("ldc-ridge", "ldc"),
         ("ldc-eye", "ldc"), ("ldc-ridge+lda", "ldc-ridge"))
CLAIMS = (  # claim; it holds where row - other row > least on every seed: row, other row, least, metric
    ("LDC is above naive", "ldc", "none", 0, "A_last"),
    ("LDC is above SDC", "ldc", "sdc", 0, "A_last"),
    ("SDC is above naive", "sdc", "none", 0, "A_last"),
    ("LDC's prototypes end nearer to the oracle's than SDC's", "sdc", "ldc", 0, "distance"),
    ("SDC's prototypes end nearer to the oracle's than those left alone", "none", "sdc", 0, "distance"),
    ("A linear projector is at least as good as an MLP", "ldc", "ldc-mlp", -1e-9, "A_last"),
    ("LDC is level with 20 exemplars of each class (within a point)", "ldc", "nme-20", -1, "A_last"),
    ("Ours: the closed form beats Adam", "ldc-ridge", "ldc", 0, "A_last"),
    ("Ours: Adam that starts at the identity beats a random start", "ldc-eye", "ldc", 0, "A_last"),
    ("Ours: LDA beats the nearest mean", "ldc-ridge+lda", "ldc-ridge", 0, "A_last"),
)


def experiments(runs):
    """(heading, words that pick it) of every data set, strategy and share of labels in which prototypes move."""
    seen = {}
    for run in (r for r in runs if r["finished"]):
        for labels in (name for name in shares(run["rows"]) if "ldc" in run["rows"][name]):
            words = {"dataset": run["dataset"], "strategy": run["strategy"], "labels": labels, "buffer_size": buffer_of(run)}
            parts = words["dataset"], words["strategy"], f"({words['buffer_size']})", label_text(labels)
            seen[" ".join(p for p in parts if p not in ("(None)", "100 % of the labels"))] = words
    return list(seen.items())


def average(runs, row, words):
    values = list(by_seed(runs, row=row, **words).values())
    return f"{spread(values)} ({len(values)})" if values else ""


def gains(runs, pair, words):
    """Difference of two rows on the same backbone, one number a seed."""
    x, y = (by_seed(runs, row=row, **words) for row in pair)
    return [x[seed] - y[seed] for seed in x if seed in y]


def difference(runs, pair, words):
    """Mean paired difference of two rows, its standard error, the seeds on which it is positive."""
    found = gains(runs, pair, words)
    if found and not any(found):
        return "same"  # Table 2's LDC is an MLP
    error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.1f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):+.1f}{error} ({sum(g > 0 for g in found)}/{len(found)})" if found else ""


def claims(runs, scale):
    """What the paper says, and what we say, checked on every experiment: for how many it holds, where it does not."""
    lines = []
    for claim, row, other, least, metric in CLAIMS:
        found = [(name, gains(runs, (row, other), {**words, "metric": metric})) for name, words in experiments(runs)]
        found = [(name, values) for name, values in found if values]
        broken = [(name, values) for name, values in found if min(values) <= least]
        places = (f"{name.replace(' of the labels', '')} {statistics.mean(values):+.{4 if metric == 'distance' else 1}f} "
                  f"({sum(v > least for v in values)}/{len(values)})" for name, values in broken)
        lines += [[claim, f"{len(found) - len(broken)} of {len(found)}", "; ".join(places)]] if found else []
    header = ["claim", "holds on every seed", "where not: mean difference (seeds on which it holds)"]
    return [f"**What holds.** Scale {scale}; an experiment is one strategy with one share of the labels.{origin(runs)}", "",
            *markdown(header, lines), ""] if lines else []


def gap_closed(runs, row, words):
    """Share of the way from naive to oracle that a row goes, mean over seeds; a gap under half a point has no share."""
    low, high, x = (by_seed(runs, row=name, **words) for name in ("none", "oracle", row))
    seeds = [seed for seed in x if seed in low and seed in high]
    if not seeds or min(high[s] - low[s] for s in seeds) < 0.5:
        return "no gap" if seeds else ""
    return spread([100 * (x[s] - low[s]) / (high[s] - low[s]) for s in seeds], 0)


def distances(runs, row, words):
    """Mean cosine distance of moved prototypes to the oracle's: after task 2, and after the last."""
    found = [(run, run["rows"].get(words["labels"], {}).get(row)) for run in find(runs, **words) if run["finished"]]
    found = [(run, line) for run, line in found if line and len(line["oracle_distance"]) > 1]
    return " -> ".join(f"{statistics.mean(distance_after(run, line, task) for run, line in found):.3f}" for task in (1, -1)) if found else ""


def draws(runs, row, words):
    """Deviation over backbones / mean deviation over draws of labels on one backbone ("0.05@1" beside "0.05")."""
    over, within = list(by_seed(runs, row=row, **words).values()), []
    for run in (r for r in find(runs, **words) if r["finished"]):
        numbers = [number(run, row, labels) for labels in run["rows"] if labels.split("@")[0] == words["labels"]]
        within += [statistics.stdev(numbers)] if len(numbers) > 1 and None not in numbers else []
    return f"{statistics.stdev(over):.2f} / {statistics.mean(within):.2f}" if within and len(over) > 1 else ""


def own_tables(runs, scale):
    """Beyond the paper: all rows on all backbones, paired differences, share of the gap, distances, what the draw of labels changes."""
    text = []
    for caption, columns, value in (
            ("Ours: rows on the same backbones, A_last.", OURS, average),
            ("Paired differences of A_last: mean ± standard error (seeds won).", PAIRS, difference),
            ("Share of the naive-to-oracle gap that is closed, in % (the oracle has all labels).", OURS[1:7], gap_closed),
            ("Mean cosine distance of old prototypes to the oracle's, after task 2 -> after the last.", OURS[:7], distances),
            ("What a seed changes: deviation of A_last over backbones / over draws of labels.", ("none", "sdc", "ldc"), draws)):
        lines = [[name, *(value(runs, column, words) for column in columns)] for name, words in experiments(runs)]
        lines = [line for line in lines if any(line[1:])]
        header = ["", *(" - ".join(c) if isinstance(c, tuple) else c for c in columns)]
        text += [f"**{caption}** Scale {scale}.{origin(runs)}", "", *markdown(header, lines), ""] if lines else []
    return text


def list_of_runs(runs):
    """Where the numbers come from and how long they took: one line a folder."""
    lines, folders = [], {}
    for run in runs:
        folders.setdefault(run["folder"].parent, []).append(run)
    for folder, group in folders.items():
        hours = [sum(run["seconds"].values()) / 3600 for run in group if run["finished"]]
        first, each = group[0], f"{statistics.mean(hours):.2f}" if hours else ""
        lines.append([f"{folder.parent.name}/{folder.name}", f"{len(hours)} of {len(group)}", each, first.get("device", ""),
                      (first.get("commit") or "")[:7], f"`{first.get('command', '')}`"])
    header = ["", "finished", "hours each", "device", "commit", "command of the first seed"]
    return ["**Runs.** Hours are without a first task that another run had learnt.", "", *markdown(header, lines), ""]


# The table at the end of a run

ROWS = ("head", "none", "sdc", "sdc-unit", "ldc", "adc", "nme-20", "oracle")
OWN_ROWS = ("ldc-eye", "ldc-ridge", "ldc-ridge+lda", "oracle+lda")


def run_table(results):
    """The table at the end of a run: one line per compensator, its accuracy after every task, A_last, A_inc, the paper's."""
    first, lines, tasks = results[0], [], min(r["tasks_done"] for r in results)
    for labels in shares(first["rows"]):
        rows = [r["rows"][labels] for r in results]
        about = f"{first['dataset']}, {first['strategy']}, scale {first['scale']}" + ("" if labels == "1" else f", {label_text(labels)}")
        lines += ["", f"{about}{', generated images' if first.get('generated') else ''}: accuracy in % over all classes seen, "
                      f"{len(results)} seed{'s' * (len(results) > 1)}"]
        body, ours = ([table_line(name, rows, tasks, first, labels) for name in names if all(name in row for row in rows)]
                      for names in (ROWS, OWN_ROWS))
        header = ["", *(f"t{t + 1}" for t in range(tasks)), "A_last", "A_inc", "paper A_last / A_inc"]
        text = [line.rstrip() for line in aligned([header, *body, *ours], "  ")[0]]
        rule = "-" * max(map(len, text))
        lines += [text[0], rule, *text[1:1 + len(body)], *([rule] if ours else []), *text[1 + len(body):]]
    return "\n".join(lines)


def table_line(name, rows, tasks, run, labels):
    curves = [row[name]["accuracy"] for row in rows]
    keys = [key_of(run["dataset"], run["strategy"], name, labels, metric, buffer_of(run)) for metric in ("A_last", "A_inc")]
    return [name, *(f"{statistics.mean(c[t] for c in curves):.1f}" for t in range(tasks)),
            spread([row[name]["A_last"] for row in rows]), spread([row[name]["A_inc"] for row in rows]),
            " / ".join(PAPER[key].split("±")[0] for key in keys if key in PAPER)]


# ------------------------------------------------------------------------------------------------------------------
# Figures: first the numbers, which go to a CSV file, then a drawing of these numbers and nothing else

BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"  # Okabe and Ito: distinct for colour-blind eyes


def summary(values):
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "deviation": deviation, "seeds": len(values)}


def drift_numbers(runs):
    """Accuracy on the first two and three tasks while all are learnt, by LwF and by CaSSLe with 25 % of the labels."""
    ways = ("naive", "none"), ("corrected", "ldc"), ("oracle", "oracle")
    curves = [(panel, panel.lower(), labels, *way) for panel, labels in (("LwF", "1"), ("CaSSLe", "0.25")) for way in ways]
    # joint training keeps all images: means over all of them
    curves += [("LwF", "joint", "1", "joint", "oracle"), ("CaSSLe", "joint-ssl", "1", "joint", "oracle")]
    for panel, strategy, labels, name, row in curves:
        rows = [r["rows"][labels][row] for r in find(runs, "cifar100", strategy) if number(r, row, labels) is not None]
        for first in (2, 3):
            for t in range(first, len(rows[0]["accuracy"]) + 1 if rows else 0):
                yield {"panel": panel, "first_tasks": first, "prototypes": name, "after_task": t,
                       **summary([row["first_tasks"][str(first)][t - 1] for row in rows])}


def draw_drift(plt, numbers):
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
    styles = {"naive": (":", "v"), "corrected": ("--", "o"), "oracle": ("-", "s"), "joint": ("-.", "^")}
    for axis, panel, title in zip(axes, ("LwF", "CaSSLe"), ("(a) LwF", "(b) CaSSLe, 25 % of the labels")):
        lines = [n for n in numbers if n["panel"] == panel]
        for first, colour, fill in ((2, ORANGE, ORANGE), (3, BLUE, "white")):
            for name, (dash, marker) in styles.items():
                curve = [n for n in lines if n["first_tasks"] == first and n["prototypes"] == name]
                axis.plot([n["after_task"] for n in curve], [n["mean"] for n in curve], color=colour, linestyle=dash,
                          marker=marker, markersize=5, markerfacecolor=fill, label=f"tasks 1-{first}, {name}" if curve else None)
        axis.xaxis.get_major_locator().set_params(integer=True)
        finish(axis, lines, title, "tasks learnt", "accuracy on the first tasks in %" if panel == "LwF" else "")
    legend(figure, axes, 4)
    return figure


def nme_numbers(runs):
    """A_last of LwF with LDC, and with the nearest mean of m stored images per class, on three data sets."""
    for dataset in tuple(NAMES)[:3]:
        for row in ("ldc", "oracle", *(f"nme-{m}" for m in (1, 5, 10, 20, 50))):
            values = list(by_seed(runs, dataset=dataset, strategy="lwf", row=row).values())
            if values:
                yield {"panel": dataset, "method": row.split("-")[0], "images_per_class": row[4:], **summary(values)}


def draw_nme(plt, numbers):
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    for axis, panel in zip(axes, NAMES):
        lines = [n for n in numbers if n["panel"] == panel]
        curve = [n for n in lines if n["method"] == "nme"]
        sizes = [int(n["images_per_class"]) for n in curve]
        axis.plot(sizes, [n["mean"] for n in curve], color=BLUE, marker="o", label="NME")
        for name, colour, dash, label in (("ldc", ORANGE, "--", "LDC, none stored"), ("oracle", BLACK, ":", "oracle, all stored")):
            for n in (n for n in lines if n["method"] == name):
                axis.plot(sizes, [n["mean"]] * len(sizes), color=colour, linestyle=dash, label=label)
        axis.set_xscale("log")
        axis.set_xticks(sizes, [str(m) for m in sizes])
        axis.minorticks_off()
        finish(axis, lines, NAMES[panel], "stored images per class", "A_last in %" if panel == "cifar100" else "")
    legend(figure, axes, 3)
    return figure


def kde_numbers(runs):
    """Density of the cosine distances between moved and oracle prototypes of old classes, after alternate tasks, seeds pooled."""
    found = [r for r in find(runs, "cifar100", "lwf") if number(r, "sdc") is not None and number(r, "ldc") is not None]
    distances = {}
    for t in range(2, min((r["tasks"] for r in found), default=0) + 1, 2):
        for row in ("sdc", "ldc"):
            distances[t, row] = [d for r in found for d in r["rows"]["1"][row]["oracle_distance"][t - 1][:-r["task_sizes"][t - 1]]]
    top = 1.1 * max((d for values in distances.values() for d in values), default=0) or 1.0
    for (t, row), values in distances.items():
        width = max(1.06 * statistics.pstdev(values) * len(values) ** -0.2, top / 200)  # all distances may be the same
        for x in (top * k / 200 for k in range(201)):  # reflected at zero: no distance is negative
            bumps = sum(math.exp(-((x - d) / width) ** 2 / 2) + math.exp(-((x + d) / width) ** 2 / 2) for d in values)
            yield {"panel": t, "method": row, "distance": x, "density": bumps / len(values) / width / math.sqrt(2 * math.pi),
                   "mean": statistics.mean(values), "deviation": statistics.pstdev(values), "classes": len(values)}


def draw_kde(plt, numbers):
    tasks = sorted({n["panel"] for n in numbers})
    figure, axes = plt.subplots(1, len(tasks), figsize=(2.5 * len(tasks), 2.8), squeeze=False, layout="constrained")
    for axis, t in zip(axes[0], tasks):
        for row, colour, dash, hatch in (("sdc", BLUE, "--", "///"), ("ldc", ORANGE, "-", None)):
            curve = [n for n in numbers if n["panel"] == t and n["method"] == row]
            x, y = [n["distance"] for n in curve], [n["density"] for n in curve]
            label = f"{row.upper()} {curve[0]['mean']:.3f} ± {curve[0]['deviation']:.3f}"
            axis.plot(x, y, color=colour, linestyle=dash, label=label)
            axis.fill_between(x, y, color=colour, alpha=0.2, hatch=hatch, linewidth=0)
        axis.legend(fontsize=7)
        finish(axis, numbers, f"after task {t}", "cosine distance to the oracle", "density" if t == tasks[0] else "")
    return figure


def toy_numbers(_):
    """Where the mean of C1 goes in two dimensions, estimated from the two classes of D_t2 by the method itself."""
    import torch
    import ldc
    generator, turn = torch.Generator().manual_seed(0), 0.9
    points = torch.tensor([[-2.0, 2.0], [3.0, -1.0], [1.0, 3.0]])[:, None] + 0.5 * torch.randn(3, 80, 2, generator=generator)
    turned = 1.6 * torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    for panel, matrix, shift in (("translation", torch.eye(2), (3.0, -1.0)), ("rotation and scaling", turned, (0.0, 0.0))):
        moved = points @ matrix + torch.tensor(shift)
        old, new, prototype = points[1:].flatten(0, 1), moved[1:].flatten(0, 1), points[0].mean(0, keepdim=True)
        torch.manual_seed(0)  # with a bias: in two dimensions a linear map alone cannot shift
        p_F = ldc.fit_projector(old, new, projector="linear+bias", epochs=1000, lr=0.1, batch_size=len(old))
        sdc, truth = ldc.sdc_update(prototype, old, new, 0.3), moved[0].mean(0, keepdim=True)
        for space, three, more in (("before", points, {}), ("after", moved, {"true mean": truth, "SDC": sdc, "LDC": p_F(prototype)})):
            spots = dict(zip(("C1", "D_t2, one class", "D_t2, other class"), three), prototype=prototype, **more)
            for what, part in spots.items():
                yield from ({"panel": panel, "space": space, "what": what, "x": x, "y": y} for x, y in part.tolist())


def draw_toy(plt, numbers):
    figure, axes = plt.subplots(2, 2, figsize=(8, 7), layout="constrained")
    looks = {"C1": (".", BLACK, 14, 1), "D_t2, one class": ("1", "#999999", 14, 1), "D_t2, other class": ("2", "#56B4E9", 14, 1),
             "prototype": ("v", "#CC79A7", 80, 1), "true mean": ("*", GREEN, 120, 1),
             "SDC": ("$\u25a1$", BLUE, 300, 1), "LDC": ("x", ORANGE, 120, 2)}  # frame, cross and star: all seen where they meet
    for line, panel in zip(axes, ("translation", "rotation and scaling")):
        for axis, space in zip(line, ("before", "after")):
            for what, (marker, colour, size, width) in looks.items():
                spots = [n for n in numbers if (n["panel"], n["space"], n["what"]) == (panel, space, what)]
                axis.scatter([n["x"] for n in spots], [n["y"] for n in spots], marker=marker, color=colour, s=size,
                             linewidths=width, label=what if spots else None)
            axis.set_aspect("equal", "datalim")
            finish(axis, numbers, f"{panel}: {space} the drift", "", "")
    legend(figure, axes.flat, 4)
    return figure


def finish(axis, numbers, title, x, y):
    axis.set(xlabel=x, ylabel=y)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    if not numbers:
        axis.tick_params(labelleft=False, labelbottom=False)
        axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center")


def legend(figure, axes, columns):
    """One legend below all panels."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncol=columns, fontsize=8)


FIGURES = {  # name -> (numbers, drawing, data sets, caption)
    "fig-drift": (drift_numbers, draw_drift, ("cifar100",), "Accuracy on the first two and three tasks while all are learnt, CIFAR-100, "
                  "means over seeds; joint is trained on all images so far, by Barlow Twins beside CaSSLe"),
    "fig-toy": (toy_numbers, draw_toy, (), "Where the mean of class C1 goes, estimated from the images of the new task: SDC finds a "
                "translation, LDC (here a linear layer with bias) a rotation and scaling too"),
    "fig-nme": (nme_numbers, draw_nme, tuple(NAMES)[:3], "LDC against the nearest mean of stored images, LwF, A_last, means over seeds"),
    "fig-kde": (kde_numbers, draw_kde, ("cifar100",), "Cosine distance of the moved prototypes of old classes to the oracle's, "
                "CIFAR-100, LwF, all seeds"),
}


def make_figure(name, runs, folder):
    """CSV and PNG of one figure; returns why it could not be drawn, None where it was."""
    numbers_of, draw, datasets, _ = FIGURES[name]
    try:
        numbers = list(numbers_of(runs))
        if not numbers:
            return "not run"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}.csv.tmp", "w", newline="") as f:
            writer = csv.DictWriter(f, list(numbers[0]))
            writer.writeheader()
            writer.writerows(numbers)
        os.replace(f.name, folder / f"{name}.csv")
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        return f"{error.name} is missing (pip install {error.name})"
    figure = draw(plt, numbers)
    if origin(runs, datasets):
        figure.suptitle(origin(runs, datasets).strip(" *"), fontsize=9)
    figure.savefig(folder / f"{name}.png.tmp", dpi=150, format="png")
    plt.close(figure)
    os.replace(folder / f"{name}.png.tmp", folder / f"{name}.png")
    return None


# ------------------------------------------------------------------------------------------------------------------
# One document per scale, and the command line


def document(runs, scale, only, drawn, figures):
    """Lines of Markdown. Without `only`, a table that no run fills is just named; a data set of another kind gets its run's table."""
    known = [r for r in runs if r["dataset"] in NAMES]
    empty = [name for name, t in TABLES.items() if not any(find(runs, **words) for _, _, words, _ in cells_of(t))]
    wanted = [name for name in TABLES if (name in only if only else known and name not in empty)]
    text = [f"### Scale {scale}", "", *([] if only else claims(runs, scale))]
    if wanted:
        warning = "" if scale == "paper" else f" Scale {scale} is not the paper's: the order of the rows can be compared, the values cannot."
        text += [f"Accuracy in %: mean ± sample standard deviation (seeds); below it the paper's value, and ours minus that.{warning}", ""]
    for name in wanted:
        text += paper_table(TABLES[name], runs, scale, whole=bool(only))
    if not only and known and empty:
        text += [f"Not run at this scale: {', '.join(TABLES[name]['caption'].split('.')[0] for name in empty)}.", ""]
    others = {}
    for run in (r for r in runs if r["dataset"] not in NAMES and r["finished"]):
        others.setdefault((run["dataset"], run["strategy"], share_of(run), buffer_of(run)), []).append(run)
    for group in others.values():  # with several shares of labels they are lines of "Ours" instead
        if len(shares(group[0]["rows"])) == 1:
            text += ["```", run_table(group).strip("\n"), "```", ""]
    text += own_tables(runs, scale)
    for name, missing in drawn.items():
        _, _, datasets, caption = FIGURES[name]
        place = f"Numbers: [CSV]({figures}/{name}.csv).{origin(runs, datasets)}\n\n![{name}]({figures}/{name}.png)"
        text += [f"**{name}.** {caption}. " + (f"Not drawn: {missing}." if missing else place), ""]
    return text + list_of_runs(runs)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def refresh(readme, text):
    """Put the text between the two markers of README.md; False where they are not there."""
    before, found, rest = (readme.read_text(encoding="utf-8") if readme.is_file() else "").partition(BEGIN)
    _, closed, after = rest.partition(END)
    if found and closed:
        write(readme, f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}")
    return bool(found and closed)


def main(argv=None):
    """The command line; returns the exit code: 1 where a figure could not be drawn, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="runs or results: <folder>/<scale>/<data set>/<strategy>/seed<k>/result.json")
    parser.add_argument("--scale", help="only this scale (default: all that are there)")
    parser.add_argument("--only", nargs="+", choices=[*TABLES, *FIGURES], help="these, also where nothing was run for them")
    parser.add_argument("--readme", type=Path, help="refresh the part of this file between the results markers")
    args = parser.parse_args(argv)
    found = {path.parents[2] for path in args.folder.glob("*/*/*/seed*")}  # shown from the paper's scale down
    scales = [args.folder / args.scale] if args.scale else sorted(found, key=lambda path: ("paper small demo smoke".find(path.name), path))
    if not scales:
        print(f"error: {args.folder} holds no runs: expected <scale>/<data set>/<strategy>/seed<k>/ there.", file=sys.stderr)
        return 2
    code, parts = 0, []
    for folder in scales:
        runs = load_runs(folder)
        named = args.only or (FIGURES if any(r["dataset"] in NAMES for r in runs) else ())
        drawn = {name: make_figure(name, runs, folder / "figures") for name in named if name in FIGURES}
        for name, missing in drawn.items():
            if missing and missing != "not run":
                code = 1
                print(f"{name} is not drawn: {missing}.", file=sys.stderr)
        text = document(runs, folder.name, args.only, drawn, "figures")
        write(folder / "tables.md", "\n".join(text))
        print("\n".join(text))
        if args.readme:
            place = os.path.relpath(folder, args.readme.parent)
            parts += document(runs, folder.name, args.only, drawn, f"{place}/figures") if any(r["dataset"] in NAMES for r in runs) else [
                f"### Scale {folder.name}", "", f"Generated images: [all tables]({place}/tables.md).", ""]
    if args.readme and not refresh(args.readme, "\n".join(parts)):
        print(f"error: {args.readme} has no place for results: expected the lines {BEGIN} and {END}.", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
