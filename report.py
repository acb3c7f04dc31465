"""Result files become the paper's tables and figures, ours beside the paper's. Reads JSON alone.

    python report.py results      results/README.md, figures, and the table in README.md
    python report.py runs         the same for your own runs: runs/README.md and figures
"""
import argparse
import json
import math
import os
import re
import statistics
import sys
from pathlib import Path

# The paper's tables. Behind a colon stand the words that pick a line's or a column's cells from
# the runs: data set, strategy, row, labels (25%, or n50: 50 images of each class), metric (A_last
# unless stated; t3: accuracy after task 3), size of NNCSL's buffer. Empty: not in the paper.

PAPER = """
Table 1. Supervised, 10 tasks
                  | cifar100 | cifar100 | tinyimagenet | tinyimagenet | imagenet100 | imagenet100
                  | A_last   | A_inc    | A_last       | A_inc        | A_last      | A_inc
LwF+NCM: lwf none | 40.5±2.7 | 56.2±3.6 | 28.6±1.1     | 44.2±1.3     | 44.0±1.9    | 64.4±0.4
LwF+SDC: lwf sdc  | 40.6±1.8 | 56.2±3.0 | 29.5±0.8     | 43.8±1.3     | 42.6±1.9    | 65.3±0.6
PASS: pass head   | 37.8±0.2 | 52.3±0.1 | 31.2±0.4     | 45.3±0.7     | 38.7±0.5    | 55.5±0.5
FeTrIL: fetril head | 37.0±0.6 | 52.1±0.5 | 24.4±0.6   | 38.5±1.1     | 40.7±0.5    | 56.3±0.8
FeCAM: fecam head | 33.1±0.9 | 48.1±1.3 | 24.9±0.5     | 38.6±1.3     | 42.4±0.9    | 57.9±1.5
EFC: efc head     | 43.6±0.7 | 58.6±0.9 | 34.1±0.8     | 48.0±0.6     | 47.3±1.4    | 59.9±1.4
LwF+LDC: lwf ldc  | 45.4±2.8 | 59.5±3.9 | 34.2±0.7     | 46.8±1.1     | 51.4±1.2    | 69.4±0.6

Table 2. Stanford Cars, pre-trained ViT-B/16, accuracy after task t: cars
                      | t1   | t3   | t5   | t7   | t10
FT+NCM: finetune none | 85.8 | 73.3 | 63.2 | 58.0 | 53.4
FT+SDC: finetune sdc  | 85.8 | 73.5 | 63.5 | 57.8 | 53.3
FT+LDC: finetune ldc  | 85.8 | 76.0 | 71.3 | 67.0 | 62.9

Table 3. Semi-supervised, CIFAR-100, 10 tasks, A_last: cifar100
                            | 0.8%      | 5%        | 25%       | 100%
LwF+NCM: lwf none           |           |           |           | 40.5±2.7
PASS, all labels: pass head |           |           |           | 37.8±0.2
PASS: pass head             | 5.91      | 15.13     | 15.84     |
NNCSL (500): nncsl head 500 | 27.4±0.51 | 31.4±0.40 | 35.3±0.30 |
NNCSL (0): nncsl head 0     | 8.7±0.63  | 9.0±0.42  | 9.32±0.39 |
PFR+naive: pfr none         | 20.5±0.44 | 24.8±0.35 | 25.7±0.12 |
CaSSLe+naive: cassle none   | 19.4±0.57 | 23.2±0.21 | 23.6±0.13 |
POCON+naive: pocon none     | 20.1±0.23 | 21.7±0.27 | 22.4±0.31 |
PFR+SDC: pfr sdc            | 16.2±0.66 | 22.5±0.57 | 24.8±0.12 |
CaSSLe+SDC: cassle sdc      | 22.1±0.69 | 25.8±0.09 | 26.5±0.04 |
POCON+SDC: pocon sdc        | 21.8±0.82 | 25.7±0.23 | 26.7±0.09 |
PFR+LDC: pfr ldc            | 18.6±0.20 | 29.3±0.12 | 33.4±0.06 |
CaSSLe+LDC: cassle ldc      | 27.0±0.60 | 32.8±0.30 | 35.0±0.21 |
POCON+LDC: pocon ldc        | 26.1±0.74 | 31.1±0.62 | 33.8±0.25 |

Table 4. Semi-supervised, ImageNet100, 10 tasks, A_last: imagenet100
                              | 1%         | 5%        | 25%        | 100%
LwF+NCM: lwf none             |            |           |            | 44.0±1.9
PASS, all labels: pass head   |            |           |            | 38.7±0.5
PASS: pass head               | 1.76       | 10.36     | 23.9       |
NNCSL (5120): nncsl head 5120 | 35.4±0.21  | 41.6±0.12 | 47.1±0.08  |
NNCSL (500): nncsl head 500   | 9.93±0.22  | 15.1±0.15 | 16.6±0.1   |
PFR+naive: pfr none           | 19.6±0.16  | 21.8±0.38 | 22.0±0.12  |
CaSSLe+naive: cassle none     | 25.37±0.27 | 26.9±0.25 | 27.36±0.11 |
POCON+naive: pocon none       | 24.2±0.32  | 26.1±0.22 | 25.8±0.20  |
PFR+SDC: pfr sdc              | 17.2±0.55  | 19.1±0.16 | 19.8±0.08  |
CaSSLe+SDC: cassle sdc        | 22.2±0.03  | 25.9±0.23 | 26.6±0.01  |
POCON+SDC: pocon sdc          | 21.8±0.08  | 25.1±0.30 | 25.7±0.03  |
PFR+LDC: pfr ldc              | 26.5±0.09  | 32.4±0.35 | 33.5±0.07  |
CaSSLe+LDC: cassle ldc        | 29.5±0.58  | 33.9±0.15 | 35.8±0.39  |
POCON+LDC: pocon ldc          | 28.3±0.37  | 33.2±0.30 | 34.0±0.28  |

Table 5. The projector p_F, CIFAR-100, A_last, CaSSLe with 25 % labelled: cifar100
                       | Linear: ldc | Linear+bias: ldc+bias | Linear+ReLU: ldc+relu | MLP: ldc-mlp
LwF+LDC: lwf           | 45.4±2.8    | 45.2±3.0              | 41.2±2.1              | 43.7±2.3
CaSSLe+LDC: cassle 25% | 35.0±0.2    | 34.3±0.2              | 29.1±0.5              | 34.9±0.4

Table 6. N stored features per class, or the mean of 25 %, CIFAR-100, A_last: cifar100
                       | Mean: 25% | N=5: n5   | N=50: n50 | N=100: n100 | N=500: n500
CaSSLe+LDC: cassle ldc | 35.0±0.2  | 21.1±0.01 | 32.9±0.03 | 33.9±0.02   | 35.05±0.04
"""
NOTES = {
    "table1": "LwF+NCM is our row none. The paper took EFC's values from EFC's own paper.",
    "table3": "NCM and naive are our row none. NNCSL (500) has the NNCSL paper's own values. \"bn "
              "leak\": all classes pass batch-norm, as in CaSSLe's and PFR's published code.",
    "table6": "The paper's N=5 (21.1) lies below its 27.0 with 0.8 % of the labels, which is four "
              "images per class, so \"N labelled images\", as here, cannot be its protocol.",
}
KINDS = {
    "dataset": "cifar100|tinyimagenet|imagenet100|cars",
    "strategy": "lwf|finetune|pass|fetril|fecam|efc|cassle|pfr|pocon|nncsl|joint|joint-ssl",
    "labels": r"[\d.]+%|n\d+",
    "metric": r"A_\w+|t\d+",
    "buffer": r"\d+",
    "row": ".*",
}
DATASETS = KINDS["dataset"].split("|")
STRATEGIES = KINDS["strategy"].split("|")


def words_of(*texts):
    """The words behind the colons, or the whole texts, by kind."""
    words = {"labels": "1", "metric": "A_last", "buffer": ""}
    for word in " ".join(text.split(": ")[-1] for text in texts).split():
        kind = next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, word))
        words[kind] = f"{float(word[:-1]) / 100:g}" if word.endswith("%") else word
    return words


def parse_tables(text):
    """{"table1": (caption, columns, cells)}; a cell is (line, column, its words, paper's value)."""
    tables = {}
    for block in text.strip().split("\n\n"):
        caption, *lines = block.splitlines()
        caption, _, about = caption.partition(": ")
        columns, cells = None, []
        for line in lines:
            name, *values = (part.strip() for part in line.split("|"))
            if not name:
                columns = [" ".join(pair) for pair in zip(columns, values)] if columns else values
                continue
            for column, value in zip(columns, values):
                if value:
                    words = words_of(about, name, column)
                    cells.append((name.split(": ")[0], column.split(": ")[0], words, value))
        columns = [column.split(": ")[0] for column in columns]
        tables[caption[:7].lower().replace(" ", "")] = caption, columns, cells
    return tables


TABLES = parse_tables(PAPER)

# --------------------------------------------------------------------------------------------------
# Runs: every row of every finished run becomes one flat record

NEEDED = set("dataset strategy scale seed tasks settings options finished rows".split())
SIZE = ("width", "first_epochs", "epochs", "first_milestones", "milestones")  # what a scale changes


def load(folder):
    """The content of every result.json, the widest network of a strategy first."""
    runs = []
    for path in sorted(folder.glob("*/*/*/seed*/result.json")):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            run = None
        if isinstance(run, dict) and NEEDED <= run.keys() and isinstance(run["rows"], dict):
            runs.append({**run, "folder": path.parent.parent.name})
        else:
            print(f"{path} is no result of ldc.py and is left out.", file=sys.stderr)
    place = {name: i for i, name in enumerate(DATASETS + STRATEGIES)}
    return sorted(runs, key=lambda run: (
        place.get(run["dataset"], 99), place.get(run["strategy"], 99),
        -run["settings"].get("width", 0), len(changes(run)), describe(run), run["seed"]))


def changes(run):
    """What a run's command changes from the preset of its data set, strategy and scale."""
    flags = run.get("command", "").replace("-", "_").split()
    values = {**run, **run["settings"], **run["options"]}
    names = {*run["settings"], *run["options"], "limit", "first_classes", "order_seed"}
    names -= {"label_fraction", "buffer_size"}  # the tables' own axes
    changed = {name: values[name] for name in sorted(names) if f"__{name}" in flags}
    if run["tasks"] != (5 if run["dataset"] == "demo" else 10):
        changed["tasks"] = run["tasks"]
    return changed


def describe(run):
    """Words such as "small scale, width 64, 20 + 8 epochs"."""
    settings, changed, words = run["settings"], changes(run), [f"{run['scale']} scale"]
    if run["scale"] != "paper" or changed.keys() & set(SIZE):
        epochs = [str(settings[name]) for name in SIZE[1:3] if name in settings]
        words += [f"width {settings.get('width')}", f"{' + '.join(epochs)} epochs"]
    for name in (name for name in changed if name not in SIZE):
        value = "" if changed[name] is True else f" {changed[name]}"
        words.append(name.replace("_", " ") + value)
    return ", ".join(words + ["generated images"] * bool(run.get("generated")))


def follows_paper(run):
    """Ten tasks of all classes, preset settings; below the paper's scale the size may differ."""
    sizes = {"paper": (), "smoke": (*SIZE, "limit", "weights")}
    fitting = {"bn_leak", *sizes.get(run["scale"], SIZE)}
    if run["dataset"] == "cars" and run["settings"].get("weights") != "none":
        fitting.add("weights")  # a file instead of a download
    return run["dataset"] in DATASETS and changes(run).keys() <= fitting


def records_of(runs):
    """Flat records; runs of one experiment have one `what`, whatever their seed."""
    records, firsts = [], {}
    for run in (run for run in runs if run["finished"]):
        buffer = str(run["settings"]["buffer_size"]) if run["strategy"] == "nncsl" else ""
        known = {"dataset": run["dataset"], "strategy": run["strategy"], "buffer": buffer,
                 "seed": run["seed"], "what": describe(run), "run": run}
        values = {**run["settings"], **run["options"]}
        share = values.get("label_fraction")
        first = firsts.setdefault((*list(known.values())[:3], share, known["what"]), values)
        if any(first[name] != values[name] for name in first.keys() & values.keys()):
            known["what"] += f", {run['folder']}"  # its presets were others
        for labels, rows in run["rows"].items():
            for row, numbers in rows.items():
                records.append({**known, "labels": labels.split("@")[0], "row": row, **numbers})
    return records


def select(records, **words):
    return [r for r in records if all(r[name] == word for name, word in words.items())]


def numbers_of(records, metric="A_last", **words):
    """{seed: number}; where labels were drawn several times the mean over draws."""
    found = {}
    for r in select(records, **words):
        value = r["accuracy"][int(metric[1:]) - 1] if metric[0] == "t" else r[metric]
        found.setdefault(r["seed"], []).append(value)
    return {seed: statistics.mean(values) for seed, values in found.items()}


def values_of(records, name):
    """The values that a field has, each once, in order."""
    return list(dict.fromkeys(r[name] for r in records))


# --------------------------------------------------------------------------------------------------
# Tables


def join(*parts):
    return ", ".join(part for part in parts if part)


def spread(values, digits=1):
    """Mean, and the sample standard deviation where there are several values."""
    values = list(values)
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def markdown(header, lines, left=1):
    """A Markdown table whose source can be read too; `left` columns are set to the left."""
    widths = [max(map(len, column)) for column in zip(header, *lines)]
    rule = ["-" * (width - 1) + "-:"[i >= left] for i, width in enumerate(widths)]
    text = []
    for line in (header, rule, *lines):
        cells = [part.ljust(width) if i < left else part.rjust(width)
                 for i, (part, width) in enumerate(zip(line, widths))]
        text.append(f"| {' | '.join(cells)} |")
    return [*text, ""]


def fill(cells, records):
    """{line: {"paper", or "ours, <what>": {column: text}}}; no paper beside generated images."""
    table = {}
    for line, column, words, value in cells:
        whose = table.setdefault(line, {"paper": {}})
        whose["paper"][column] = value.replace("±", " ± ")
        for what in values_of(records, "what"):
            numbers = numbers_of(records, what=what, **words)
            if numbers:
                text = f"{spread(numbers.values())} ({len(numbers)})"
                whose.setdefault(join("ours", what), {})[column] = text
    for whose in table.values():
        if any("generated images" in name for name in whose):
            whose["paper"] = {}
    return table


def paper_table(columns, cells, records):
    """One table of the paper, what was not run named below it; [] where nothing was."""
    table = fill(cells, records)
    run = {line: list(whose.values())[1:] for line, whose in table.items()}
    used = {column for ours in run.values() for line in ours for column in line}
    shown = [column for column in columns if column in used]
    lines = []
    for line in (line for line in table if run[line]):
        filled = [(name, values) for name, values in table[line].items() if values]
        for i, (name, values) in enumerate(filled):
            lines.append(["" if i else line, name, *(values.get(c, "") for c in shown)])
    missing = [c for c in columns if c not in used] + [line for line in table if not run[line]]
    text = [*markdown(["", "", *shown], lines, left=2), f"Not run: {', '.join(missing)}.", ""]
    return text[:None if missing else -2] if lines else []


ROWS = ("pixels head none sdc sdc-unit adc ldc ldc+bias ldc+relu ldc-mlp ldc-eye ldc-ridge "
        "ldc-ridge+lda nme-1 nme-5 nme-10 nme-20 nme-50 oracle oracle+lda").split()
COMPENSATORS = r"(?!pixels$|head$|none$|oracle$|nme-|.*\+lda$).*"


def ordered_rows(records):
    """Names of rows in the order of ROWS; one that is not there comes last."""
    place = {row: i for i, row in enumerate(ROWS)}
    return sorted(values_of(records, "row"), key=lambda row: place.get(row, 99))


def experiments(records):
    """{heading: records} by data set, strategy, what, buffer, and share of the labels."""
    parts = {}
    for r in records:
        if r["labels"][0] != "n":  # which is Table 6's
            share = "" if r["labels"] == "1" else f"{100 * float(r['labels']):g} % of the labels"
            buffer = r["buffer"] and f"buffer {r['buffer']}"
            heading = join(f"{r['dataset']} {r['strategy']}", r["what"], share, buffer)
            parts.setdefault(heading, []).append(r)
    return parts


def row_table(records, value, wanted=".*"):
    """A line for each experiment, a column for each row that one of them has."""
    rows = [row for row in ordered_rows(records) if re.fullmatch(wanted, row)]
    lines = []
    for heading, part in experiments(records).items():
        seeds = len(values_of(part, "seed"))
        lines.append([f"{heading} ({seeds})", *(value(part, row, seeds) for row in rows)])
    return markdown(["", *rows], [line for line in lines if any(line[1:])])


def average(part, row, seeds):
    """A_last; the number of seeds where not every seed has the row."""
    numbers = numbers_of(part, row=row)
    count = "" if len(numbers) == seeds else f" ({len(numbers)})"
    return spread(numbers.values()) + count if numbers else ""


def gap_closed(part, row, _):
    """(row - none) / (oracle - none) in %, over seeds; a gap under half a point has no share."""
    none, oracle, ours = (numbers_of(part, row=name) for name in ("none", "oracle", row))
    seeds = [seed for seed in ours if seed in none and seed in oracle]
    if any(oracle[seed] - none[seed] < 0.5 for seed in seeds):
        return "no gap"
    found = [100 * (ours[s] - none[s]) / (oracle[s] - none[s]) for s in seeds]
    return spread(found, 0) if found else ""


def runs_table(runs):
    """What was run, a line for each folder: seeds, commit, processor, threads, minutes."""
    lines, folders = [], {}
    for run in (run for run in runs if run["finished"]):
        name = join(f"{run['dataset']}/{run['folder']}", describe(run))
        folders.setdefault(name, []).append(run)
    for name, part in folders.items():
        line = [name, " ".join(str(run["seed"]) for run in part)]
        for fact in ("commit", "cpu", "threads"):
            facts = [run.get(fact) or (run.get("device") if fact == "cpu" else "?") for run in part]
            end = 7 if fact == "commit" else None
            line.append(join(*dict.fromkeys(str(value)[:end] for value in facts)))
        minutes = statistics.mean(sum(run.get("seconds", {}).values()) / 60 for run in part)
        lines.append([*line, f"{minutes:.0f}"])
    return markdown(["", "seeds", "commit", "processor", "threads", "minutes per seed"], lines)


def run_table(results):
    """The table at the end of a run: every row, its accuracy after each task, A_last, A_inc."""
    records = records_of([{**run, "finished": True, "folder": ""} for run in results])
    tasks = min(run["tasks_done"] for run in results)
    metrics = [*(f"t{t}" for t in range(1, tasks + 1)), "A_last", "A_inc"]
    text = []
    for heading, part in experiments(records).items():
        lines = []
        for row in ordered_rows(part):
            numbers = [numbers_of(part, metric, row=row).values() for metric in metrics]
            curve = [f"{statistics.mean(values):.1f}" for values in numbers[:-2]]
            lines.append([row, *curve, *map(spread, numbers[-2:]), paper_values(part[0], row)])
        header = ["", *metrics, "paper A_last / A_inc"]
        end = len(header) - (not any(line[-1] for line in lines))  # nothing of the paper's
        seeds = len(values_of(part, "seed"))
        text += [f"{heading}: accuracy in % over all classes seen, seeds: {seeds}", ""]
        text += markdown(header[:end], [line[:end] for line in lines])
    return "\n".join(text)


def paper_values(record, row):
    """The paper's "A_last / A_inc"; "" where the run is not the paper's experiment."""
    found = {}
    if changes(record["run"]) or record["run"].get("generated"):
        return ""
    for *_, cells in TABLES.values():
        for *_, words, value in cells:
            if select([{**record, "row": row, "metric": words["metric"]}], **words):
                found.setdefault(words["metric"], value.split("±")[0])
    return " / ".join(found[metric] for metric in ("A_last", "A_inc") if metric in found)


# --------------------------------------------------------------------------------------------------
# Figures: first the numbers, which go to a CSV file, then a drawing of these numbers alone


def chosen(records, dataset, strategy):
    """The records that a figure shows: the widest network with the paper's protocol."""
    found = select(records, dataset=dataset, strategy=strategy)
    found = [r for r in found if follows_paper(r["run"])]
    return select(found, what=found[0]["what"]) if found else []


def point(panel, series, x, values):
    """One point of a figure: mean and deviation over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"panel": panel, "series": series, "x": round(x, 4),
            "y": round(statistics.mean(values), 4), "deviation": round(deviation, 4),
            "seeds": len(values)}


def drift_points(records):
    """Accuracy on the first tasks while all are learnt: LwF, and CaSSLe with 25 % of the labels."""
    ways = {"no compensation": "none", "LDC": "ldc", "oracle": "oracle", "joint training": "oracle"}
    panels = {"LwF": ("lwf", "1", "joint"),
              "CaSSLe with 25 % labelled": ("cassle", "0.25", "joint-ssl")}
    for panel, (strategy, labels, joint) in panels.items():
        for first in ("2", "3"):
            for way, row in ways.items():
                source, share = (joint, "1") if way == "joint training" else (strategy, labels)
                found = select(chosen(records, "cifar100", source), row=row, labels=share)
                curves = {r["seed"]: r["first_tasks"][first] for r in found}.values()
                for t, values in list(enumerate(zip(*curves), 1))[int(first) - 1:]:
                    yield point(panel, f"tasks 1-{first}: {way}", t, values)


def nme_points(records):
    """A_last of LwF with LDC, and with the nearest mean of m stored images per class."""
    for dataset in DATASETS[:3]:
        found = chosen(records, dataset, "lwf")
        for stored in (row for row in ordered_rows(found) if row.startswith("nme-")):
            for row, series in (("ldc", "LDC"), ("oracle", "oracle: all stored"), (stored, "NME")):
                numbers = list(numbers_of(found, row=row).values())
                if numbers:
                    yield point(dataset, series, int(stored[4:]), numbers)


def kde_points(records):
    """Density of the distances of moved prototypes to the oracle's, seeds pooled."""
    pools = {}
    for r in chosen(records, "cifar100", "lwf"):
        for t in range(2, r["run"]["tasks"] + 1, 2):
            if r["row"] in ("sdc", "ldc") and r["oracle_distance"]:
                moved = r["oracle_distance"][t - 1][:-r["run"]["task_sizes"][t - 1]]
                pools.setdefault((t, r["row"].upper()), []).extend(moved)
    top = 1.1 * max((d for pool in pools.values() for d in pool), default=0) or 1.0
    for (t, row), pool in sorted(pools.items()):
        width = max(1.06 * statistics.pstdev(pool) * len(pool) ** -0.2, top / 200)
        for x in (top * k / 200 for k in range(201)):
            near = [x - d for d in pool] + [x + d for d in pool]  # no distance is negative
            bumps = sum(math.exp(-(gap / width) ** 2 / 2) for gap in near)
            density = bumps / (len(pool) * width * math.sqrt(2 * math.pi))
            yield point(f"after task {t}", f"density of {row}", x, [density])


def toy_points(_):
    """Where the mean of C1 goes in two dimensions, estimated from D_t2 by the method itself."""
    import torch
    import ldc
    noise = torch.randn(3, 80, 2, generator=torch.Generator().manual_seed(0))
    points = torch.tensor([[-2.0, 2.0], [3.0, -1.0], [1.0, 3.0]])[:, None] + 0.5 * noise
    cos, sin = 1.6 * math.cos(0.9), 1.6 * math.sin(0.9)
    prototype = points[0].mean(0, keepdim=True)
    spaces = {"before the drift": points, "after a translation": points + torch.tensor([3.0, -1.0]),
              "after rotation and scaling": points @ torch.tensor([[cos, sin], [-sin, cos]])}
    for panel, moved in spaces.items():
        old, new = (space[1:].flatten(0, 1) for space in (points, moved))
        series = {"C1": moved[0], "D_t2": new, "prototype": prototype}
        if moved is not points:
            torch.manual_seed(0)  # with a bias: in two dimensions a linear map alone cannot shift
            p_F = ldc.fit_projector(old, new, projector="linear+bias", epochs=1000, lr=0.1,
                                    batch_size=len(old))
            series["true mean"] = moved[0].mean(0, keepdim=True)
            series["moved by SDC"] = ldc.sdc_update(prototype, old, new, 0.3)
            series["moved by LDC"] = p_F(prototype)
        for name, part in series.items():
            yield from (point(panel, name, round(x, 3), [round(y, 3)]) for x, y in part.tolist())


BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito's colours, distinct for colour-blind eyes
STYLES = {  # end of a series' name -> matplotlib's format, colour, size of its markers
    "C1": (".", "black", 4), "D_t2": ("1", "#999999", 4), "prototype": ("v", "#CC79A7", 9),
    "true mean": ("*", "#009E73", 15), "by SDC": ("s", BLUE, 12), "by LDC": ("x", ORANGE, 8),
    "of SDC": ("--", BLUE, 0), "of LDC": ("-", ORANGE, 0), "NME": ("o-", BLUE, 5),
    "stored": (":", "black", 0), "no compensation": ("v:", ORANGE, 5), "LDC": ("o--", ORANGE, 5),
    "joint training": ("^-.", ORANGE, 5), "oracle": ("s-", ORANGE, 5),
}


def draw(plt, points, xlabel, ylabel, width, height, columns):
    """A panel for each value of "panel", in it a curve for each series; one legend below."""
    panels, handles = values_of(points, "panel"), {}
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + width * len(panels), height),
                                squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels):
        for i, series in enumerate(values_of(select(points, panel=panel), "series")):
            curve = select(points, panel=panel, series=series)
            x, y, bars = ([p[key] for p in curve] for key in ("x", "y", "deviation"))
            form, colour, size = STYLES[next(end for end in STYLES if series.endswith(end))]
            colour = BLUE if "1-3" in series else colour
            aside = 0.08 * i - 0.2 if any(bars) and "tasks" in series else 0  # bars side by side
            handles[series] = axis.errorbar(
                [place + aside for place in x], y, yerr=bars if any(bars) else None, fmt=form,
                color=colour, markerfacecolor="none" if form == "s" or "1-3" in series else colour,
                markersize=size, markeredgewidth=1.5, elinewidth=0.6, capsize=2)
            if ylabel == "density":
                axis.fill_between(x, y, color=colour, alpha=0.2)
        axis.set(title=panel, xlabel=xlabel, ylabel=ylabel)
        axis.grid(alpha=0.3)
        if "stored" in xlabel:
            axis.set_xscale("log")
            axis.set_xticks(x, x)
            axis.minorticks_off()
        if not xlabel:
            axis.set_aspect("equal", "datalim")
    figure.legend(handles.values(), handles, loc="outside lower center", ncol=columns, fontsize=8)
    return figure


FIGURES = {  # name -> (points, labels of the axes, size of a panel, columns of the legend, caption)
    "fig-toy": (toy_points, "", "", 3.6, 3.9, 7, "Where the mean of class C1 goes, estimated from "
                "the new task's images: SDC finds a translation, LDC (with a bias) rotation too"),
    "fig-drift": (drift_points, "tasks learnt", "accuracy in %", 4.5, 4.6, 2,
                  "Accuracy on the first tasks while all are learnt, CIFAR-100"),
    "fig-nme": (nme_points, "stored images per class", "A_last in %", 4.0, 3.8, 3,
                "LDC against the nearest mean of stored images (NME), LwF"),
    "fig-kde": (kde_points, "cosine distance", "density", 2.3, 3.2, 2,
                "Distance of the moved prototypes of old classes to the oracle's, CIFAR-100, LwF"),
}


def make_figure(name, records, folder):
    """CSV and PNG of one figure; returns why it could not be drawn, "" where it was."""
    points_of, *layout, _ = FIGURES[name]
    table, picture = folder / f"{name}.csv", folder / f"{name}.png"
    try:
        points = list(points_of(records))
        if not points:
            return "not run"
        lines = [points[0], *(p.values() for p in points)]
        text = "".join(",".join(map(str, line)) + "\n" for line in lines)
        if picture.exists() and table.exists() and table.read_text() == text:
            return ""  # another matplotlib draws other bytes; delete the PNG to draw it again
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text(text, newline="\n")
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        return f"{error.name} is missing (pip install {error.name})"
    figure = draw(plt, points, *layout)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return ""


# --------------------------------------------------------------------------------------------------
# The documents, and the command line

REMARKS = {
    "paper": "Every setting as the paper has it.",
    "small": "Real data, but a narrower network or shorter schedules than the paper's: only rows "
             "on one backbone can be compared. The paper's values are there for orientation.",
    "demo": "Generated images, no data set of the paper.",
    "smoke": "A test that everything runs, on a few generated images: the numbers mean nothing.",
}
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def section(scale, runs, only, folder):
    """Markdown of one scale; and of its figures, {name: why it was not drawn}."""
    records, failed, empty = records_of(runs), {}, []
    fitting = [r for r in records if follows_paper(r["run"])]
    others = [r for r in records if r["dataset"] in DATASETS and not follows_paper(r["run"])]
    text = [f"## Scale {scale}", "", REMARKS[scale], "Accuracy in %: mean ± sample standard "
            "deviation (number of seeds).", ""]
    for name, (caption, columns, cells) in TABLES.items():
        table = paper_table(columns, cells, fitting) if name in only else []
        if table:
            text += [f"**{caption}.**", "", *table, *([NOTES[name], ""] if name in NOTES else [])]
        elif name in only and fitting:
            empty.append(caption[:7])
    for words, names in (("Not run at this scale", empty), ("Unfinished", unfinished(runs)),
                         ("Not the paper's protocol, so not in its tables", experiments(others))):
        text += [f"{words}: {'; '.join(names)}.", ""] if names else []
    if records:
        text += ["**All rows, A_last.**", "", *row_table(records, average),
                 "**Share of the gap closed, (row - none) / (oracle - none), in %.** The oracle "
                 "has all labels.", "", *row_table(records, gap_closed, COMPENSATORS)]
    seen = [chosen(records, "cifar100", strategy)[:1] for strategy in ("lwf", "cassle")]
    for r in sum(seen, []):
        text += [f"The figures' {r['strategy']}: {r['what']}.", ""]
    for name in (name for name in FIGURES if name in only and (fitting or only == [name])):
        failed[name] = make_figure(name, records, folder / scale / "figures")
        place = f"{scale}/figures/{name}"
        shown = f"Numbers: [CSV]({place}.csv).\n\n![{name}]({place}.png)"
        why = failed[name] and f"Not drawn: {failed[name]}."
        text += [f"**{name}.** {FIGURES[name][-1]}. {why or shown}", ""]
    return text + (["**What was run.**", "", *runs_table(runs)] if records else []), failed


def unfinished(runs):
    return [f"{run['dataset']} {run['folder']} seed {run['seed']}, {run['tasks_done']} of "
            f"{run['tasks']} tasks" for run in runs if not run["finished"]]


def short_table(runs):
    """README.md's table: LwF on CIFAR-100, the paper's row first, ours below."""
    rows = {"none": "no compensation", "sdc": "SDC", "ldc": "LDC", "oracle": "oracle"}
    paper = {words["row"]: value for *_, words, value in TABLES["table1"][2]
             if words == words_of("cifar100 lwf", words["row"])}
    cells = [("", row, words_of("cifar100 lwf", row), paper.get(row, "")) for row in rows]
    real = [run for run in runs if follows_paper(run) and not run.get("generated")]
    table = fill(cells, records_of(real))[""]
    lines = [[name, *(values.get(row, "") for row in rows)] for name, values in table.items()]
    return "\n".join(markdown(["CIFAR-100, 10 tasks, LwF: A_last in %", *rows.values()], lines))


def refresh(path, text):
    """Put the text between the two markers of a file; what stands around them stays."""
    kept = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}{END}\n"
    before, begin, rest = kept.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise OSError(f"{path} has no place for tables: expected {BEGIN} and {END} in it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"{before}{begin}\n{text.strip()}\n{end}{after}"
    path.write_text(text, encoding="utf-8", newline="\n")


def main(argv=None):
    """The command line; returns 1 where a figure could not be drawn, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="runs or results; its README.md is written, and "
                        "for results/ the table in the README.md beside it")
    parser.add_argument("--scale", choices=REMARKS, help="only this scale (default: all)")
    names = [*TABLES, *FIGURES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"only these, of {' '.join(names)} (default: all)")
    args = parser.parse_args(argv)
    text, failed = [], {}
    try:
        runs = load(args.folder)
        found = {run["scale"] for run in runs}
        for scale in [args.scale] if args.scale else [s for s in REMARKS if s in found]:
            part = [run for run in runs if run["scale"] == scale]
            lines, drawn = section(scale, part, args.only, args.folder)
            text += lines if part or drawn else []
            failed.update({name: why for name, why in drawn.items() if why not in ("", "not run")})
        if not text:
            raise OSError(f"{args.folder} holds no runs at {args.scale or 'any'} scale: expected "
                          "<scale>/<data set>/<strategy>/seed<k>/result.json there.")
        refresh(args.folder / "README.md", "\n".join(text))
        if args.folder.resolve().name == "results" and not args.scale:
            refresh(args.folder.resolve().parent / "README.md", short_table(runs))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(text))
    for name, why in failed.items():
        print(f"{name} is not drawn: {why}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
