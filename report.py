"""Result files become the paper's tables and figures, ours beside the paper's. Reads JSON alone.

    python report.py results         results/README.md, figures, and the table in README.md
    python report.py runs            the same for your own runs: runs/README.md and figures
    python report.py runs results    your runs beside the recorded ones, in runs/README.md
    python report.py runs --latex    tables for a paper, with booktabs
"""
import argparse
import functools
import json
import math
import re
import statistics
import sys
import textwrap
from pathlib import Path

KINDS = {  # of the words that results/paper.txt has behind its colons
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
    """{"table1": (caption, columns, cells, note)}; a cell: line, column, words, paper's value."""
    tables = {}
    for block in text.strip().split("\n\n")[1:]:
        title, header, *lines = block.splitlines()
        caption, _, about = title.partition(": ")
        note = "" if "|" in lines[-1] else lines.pop()
        columns = [column.strip() for column in header.split("|")[1:]]
        cells = []
        for line in lines:
            name, *values = (part.strip() for part in line.split("|"))
            for column, value in zip(columns, values):
                if value:
                    words = words_of(about, name, column)
                    cells.append((name.split(": ")[0], column.split(": ")[0], words, value))
        columns = [column.split(": ")[0] for column in columns]
        tables[f"table{caption[6]}"] = caption, columns, cells, note
    return tables


PAPER = Path(__file__).parent / "results" / "paper.txt"
TABLES = parse_tables(PAPER.read_text(encoding="utf-8")) if PAPER.exists() else {}


def paper_value(words, row):
    """The A_last that the paper's tables have for these words and row, or ""."""
    wanted = {**words, "row": row, "metric": "A_last"}
    cells = (cell for table in TABLES.values() for cell in table[2])
    return next((value for *_, about, value in cells if about.items() <= wanted.items()), "")


# --------------------------------------------------------------------------------------------------
# Runs: every row of every finished run becomes one flat record

SIZE = ("width", "first_epochs", "epochs", "first_milestones", "milestones")  # what a scale changes


OTHER_READINGS = {"bn_leak", "unit_features", "lambda_retrospection", "retrospection"}


def load(*folders):
    """The content of every result.json, the widest network of a strategy first."""
    runs = []
    for path in sorted(p for folder in folders for p in folder.glob("*/*/*/seed*/result.json")):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            records_of([run])
            run["finished"], run["tasks_done"], run["task_sizes"], run["scale"]
        except (AttributeError, KeyError, TypeError, ValueError):
            print(f"{path} is no result of ldc.py and is left out.", file=sys.stderr)
        else:
            runs.append({**run, "folder": path.parent.parent.name})
    place = {name: i for i, name in enumerate(DATASETS + STRATEGIES)}
    return sorted(runs, key=lambda run: (
        place.get(run["dataset"], 99), place.get(run["strategy"], 99),
        -run["settings"].get("width", 0), len(changes(run)), describe(run), run["seed"]))


def changes(run):
    """What a run changes from its presets, but for label_fraction and buffer_size: table axes."""
    return {name: value for name, value in sorted(run["changed"].items())
            if name not in ("label_fraction", "buffer_size")}


def describe(run):
    """Words such as "small scale, width 64, 20 + 8 epochs"."""
    settings, changed, words = run["settings"], changes(run), [f"{run['scale']} scale"]
    if run["scale"] != "paper" or changed.keys() & set(SIZE):
        epochs = [str(settings[name]) for name in SIZE[1:3] if name in settings]
        words += [f"width {settings.get('width')}", f"{' + '.join(epochs)} epochs"]
    for name in (name for name in changed if name not in SIZE):
        value = "images" if name == "generated" else changed[name]
        words.append(name.replace("_", " ") + ("" if value is True else f" {value}"))
    return ", ".join(words)


def follows_paper(run):
    """Ten tasks of all classes, preset settings; in smaller scales size and rate may differ."""
    sizes = {"paper": (), "smoke": (*SIZE, "limit", "weights", "generated")}
    fitting = {*OTHER_READINGS, *sizes.get(run["scale"], (*SIZE, "lr"))}
    if "retrospection" in changes(run):  # POCON's newest command
        fitting |= {*SIZE, "expert_epochs", "batch_size"}
    if run["dataset"] == "cars" and run["settings"].get("weights") != "none":
        fitting.add("weights")  # a file instead of a download
    return run["dataset"] in DATASETS and changes(run).keys() <= fitting


def records_of(runs):
    """Flat records; runs of one experiment have one `what`, whatever their seed."""
    records = []
    for run in runs:
        buffer = str(run["settings"]["buffer_size"]) if run["strategy"] == "nncsl" else ""
        known = {"dataset": run["dataset"], "strategy": run["strategy"], "buffer": buffer,
                 "seed": run["seed"], "what": describe(run), "run": run}
        for labels, rows in run["rows"].items():
            for row, numbers in rows.items():
                records.append({**known, "labels": labels, "row": row, **numbers})
    return records


def select(records, **words):
    return [r for r in records if words.items() <= r.items()]


def numbers_of(records, metric="A_last", **words):
    """{seed: number} of one row; metric "t3": the accuracy after task 3."""
    return {r["seed"]: r["accuracy"][int(metric[1:]) - 1] if metric[0] == "t" else r[metric]
            for r in select(records, **words)}


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


def markdown(header, lines):
    """A Markdown table whose source can be read too."""
    first, *widths = (max(map(len, column)) for column in zip(header, *lines))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in widths)]
    text = []
    for name, *cells in (header, rule, *lines):
        cells = [cell.rjust(width) for cell, width in zip(cells, widths)]
        text.append(f"| {' | '.join([name.ljust(first), *cells])} |")
    return [*text, ""]


def fill(cells, records):
    """{(line, "paper" or "ours, <what>"): {column: text}}; the smoke test is beside no paper."""
    table = {}
    kinds = values_of(records, "what")
    smoke = any("smoke scale" in what for what in kinds)
    for line, column, words, value in cells:
        paper = table.setdefault((line, "paper"), {})
        if not smoke:
            paper[column] = value.replace("±", " ± ")
        for what in kinds:
            numbers = numbers_of(records, what=what, **words)
            if numbers:
                text = f"{spread(numbers.values())} ({len(numbers)})"
                table.setdefault((line, f"ours, {what}"), {})[column] = text
    return table


def paper_table(caption, columns, cells, note, records):
    """One table of the paper; what was not run is named below it."""
    table = fill(cells, records)
    run = set()  # names of lines and columns
    for (line, whose), values in table.items():
        if whose != "paper":
            run |= {line, *values}
    if not run:
        return [f"**{caption}.** Not run.", ""]
    shown = [column for column in columns if column in run]
    lines = [[f"{line}, {whose}", *(values.get(column, "") for column in shown)]
             for (line, whose), values in table.items() if line in run and values]
    text = [f"**{caption}.**", "", *markdown(["", *shown], lines)]
    names = dict.fromkeys([*columns, *(line for line, _ in table)])
    missing = [name for name in names if name not in run]
    text += [f"Not run: {', '.join(missing)}.", ""] if missing else []
    return text + ([note, ""] if note else [])


ROWS = ("pixels head none sdc sdc-unit adc ldc ldc+bias ldc+relu ldc-mlp ldc-ridge ldc-ridge+lda "
        "ldc-anchor ldc-anchor+lda nme-1 nme-5 nme-10 nme-20 nme-50 oracle oracle+lda").split()
MAIN = ("head", "none", "sdc", "ldc", "ldc-ridge", "ldc-anchor", "oracle")  # shown everywhere
COMPENSATORS = r"(?!pixels$|head$|none$|oracle$|nme-|.*\+lda$).*"


def ordered_rows(records, every_row=True):
    """Names of rows in the order of ROWS, one that is not there last; or the main ones alone."""
    place = {row: i for i, row in enumerate(ROWS)}
    rows = sorted(values_of(records, "row"), key=lambda row: place.get(row, 99))
    return [row for row in rows if every_row or row in MAIN or row not in ROWS]


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
        lines.append([f"{heading} ({seeds})", *(value(part, row) for row in rows)])
    return markdown(["", *rows], [line for line in lines if any(line[1:])])


def average(part, row, metric="A_last"):
    """Mean and deviation; the number of seeds where not every seed has the row."""
    numbers = numbers_of(part, metric, row=row)
    count = "" if len(numbers) == len(values_of(part, "seed")) else f" ({len(numbers)})"
    return spread(numbers.values()) + count if numbers else ""


def shares_closed(part, row):
    """(row - none) / (oracle - none) in % by seed; None if a gap is too small to have a share."""
    none, oracle, ours = (numbers_of(part, row=name) for name in ("none", "oracle", row))
    seeds = [seed for seed in ours if seed in none and seed in oracle]
    if any(oracle[seed] - none[seed] < 0.5 for seed in seeds):
        return None
    return [100 * (ours[s] - none[s]) / (oracle[s] - none[s]) for s in seeds]


def gap_closed(part, row):
    shares = shares_closed(part, row)
    return "no gap" if shares is None else spread(shares, 0) if shares else ""


def runs_table(runs):
    """What was run: a line for each folder, and for what is unfinished there."""
    folders = {}
    for run in runs:
        done = "" if run["finished"] else f"{run['tasks_done']} of {run['tasks']} tasks"
        name = join(f"{run['dataset']}/{run['folder']}", describe(run), done)
        folders.setdefault(name, []).append(run)
    lines = []
    for name, part in folders.items():
        commits = dict.fromkeys((run.get("commit") or "?")[:7] for run in part)
        minutes = statistics.mean(sum(run.get("seconds", {}).values()) / 60 for run in part)
        seeds = " ".join(str(run["seed"]) for run in part)
        lines.append([name, seeds, join(*commits), f"{minutes:.0f}"])
    return markdown(["", "seeds", "commit", "minutes per seed"], lines)


def run_table(results, every_row=True):
    """The table at the end of a run: accuracy after each task, A_last, A_inc, forgetting."""
    records = records_of(results)
    tasks = min(run["tasks_done"] for run in results)
    metrics = [*(f"t{t}" for t in range(1, tasks + 1)), "A_last", "A_inc", "forgetting"]
    text = []
    for heading, part in experiments(records).items():
        run, lines = part[0]["run"], []
        paper = follows_paper(run) and run["finished"] and run["scale"] != "smoke"
        for row in ordered_rows(part, every_row):
            numbers = [numbers_of(part, metric, row=row).values() for metric in metrics]
            curve = [f"{statistics.mean(values):.1f}" for values in numbers[:-3]]
            lines.append([row, *curve, *map(spread, numbers[-3:])])
            lines[-1] += [paper_value(part[0], row)] * paper
        done = "" if tasks == run["tasks"] else f"{tasks} of {run['tasks']} tasks"
        seeds = len(values_of(part, "seed"))
        text += [f"{join(heading, done)}: accuracy in % over all classes seen, seeds: {seeds}", ""]
        text += markdown(["", *metrics, *["paper's A_last"] * paper], lines)
        text += gap_sentence(part)
    return "\n".join(text)


def gap_sentence(part):
    """How much LDC and our best row close of the gap between no compensation and the oracle."""
    shares = {row: gap_closed(part, row) for row in ("ldc", "ldc-anchor")}
    said = [f"{row} closes {share} %" for row, share in shares.items() if share[:2].strip("-")
            and share != "no gap"]
    seeds = len(values_of(part, "seed"))
    gap = f" of the gap between none and oracle in A_last, {seeds} seed{'s' * (seeds > 1)}."
    return [", ".join(said) + gap, ""] if said else []


def latex_table(records):
    """A booktabs table for each data set and protocol: mean ± sample deviation over seeds."""
    text = []
    protocols = {}
    for r in records:
        if r["labels"][0] != "n":
            run = r["run"]
            tasks = f"{run['tasks']} tasks"
            first = run.get("first_classes") and f"{run['first_classes']} classes first"
            protocols.setdefault(join(r["dataset"], tasks, first), []).append(r)
    for protocol, part in protocols.items():
        text += [f"% {protocol}", r"\begin{tabular}{llrrr}", r"\toprule",
                 r"run & row & $A_{last}$ & $A_{inc}$ & forgetting \\"]
        for heading, group in experiments(part).items():
            text.append(r"\midrule")
            for row in ordered_rows(group, every_row=False):
                cells = [spread(numbers_of(group, metric, row=row).values()).replace("±", r"$\pm$")
                         for metric in ("A_last", "A_inc", "forgetting")]
                name = heading.replace("%", r"\%").replace("_", r"\_")
                text.append(" & ".join([name, row, *cells]) + r" \\")
        text += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(text)


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
    """Accuracy on the first tasks while all are learnt, beside that of joint training."""
    panels = {"LwF": ("lwf", "1", "joint"), "CaSSLe": ("cassle", "0.25", "joint-ssl")}
    for panel, (strategy, labels, joint) in panels.items():
        found = select(chosen(records, "cifar100", strategy), labels=labels)
        seeds = len(values_of(found, "seed"))
        about = f"{found[0]['what']}, {seeds} seed{'s' * (seeds > 1)}" if found else ""
        union = select(chosen(records, "cifar100", joint), labels="1")
        series = {"no compensation": select(found, row="none"), "LDC": select(found, row="ldc"),
                  "oracle": select(found, row="oracle"),
                  "joint training": select(union, row="oracle")}
        for first in ("2", "3"):
            for name, part in series.items():
                curves = {r["seed"]: r["first_tasks"][first] for r in part}.values()
                for t, values in list(enumerate(zip(*curves), 1))[int(first) - 1:]:
                    yield point(f"{panel}: tasks 1-{first}\n{about}", name, t, values)


def nme_points(records):
    """A_last of LwF with LDC, and with the nearest mean of m stored images per class."""
    for dataset in DATASETS[:3]:
        found = chosen(records, dataset, "lwf")
        for stored in (row for row in ordered_rows(found) if row.startswith("nme-")):
            for series, row in (("LDC", "ldc"), ("oracle", "oracle"), ("NME", stored)):
                numbers = list(numbers_of(found, row=row).values())
                if numbers:
                    yield point(dataset, series, int(stored[4:]), numbers)


def kde_points(records):
    """Density of the distances of moved prototypes to the oracle's, seeds pooled."""
    pools = {}
    for r in chosen(records, "cifar100", "lwf"):
        for t in range(2, r["run"]["tasks"] + 1, 2):
            if r["row"] in KDE_ROWS and r["oracle_distance"]:
                moved = r["oracle_distance"][t - 1][:-r["run"]["task_sizes"][t - 1]]
                pools.setdefault((t, KDE_ROWS[r["row"]]), []).extend(moved)
    top = 1.1 * max((d for pool in pools.values() for d in pool), default=0) or 1.0
    for (t, row), pool in sorted(pools.items()):
        width = max(1.06 * statistics.pstdev(pool) * len(pool) ** -0.2, top / 200)
        for x in (top * k / 200 for k in range(201)):
            near = [x - d for d in pool] + [x + d for d in pool]  # no distance is negative
            bumps = sum(math.exp(-(gap / width) ** 2 / 2) for gap in near)
            density = bumps / (len(pool) * width * math.sqrt(2 * math.pi))
            yield point(f"after task {t}", row, x, [density])


def largest_share(run):
    """The largest share of labels that a run has rows for, "1" or "0.25"."""
    return max((labels for labels in run["rows"] if labels[0] != "n"), key=float, default=None)


def curves_points(records):
    """Accuracy over the tasks of every run, with its largest share of labels."""
    shown = [r for r in records if r["labels"] == largest_share(r["run"])]
    for heading, part in experiments(shown).items():
        for row in ordered_rows(part, every_row=False):
            curves = [r["accuracy"] for r in select(part, row=row)]
            for t, values in enumerate(zip(*curves), 1):
                yield point(heading, row, t, values)


def with_anchors(records, what):
    """{width of the anchor: records} of the runs that nothing else tells from this experiment."""
    parts = {}
    for r in records:
        changed = dict(r["run"]["changed"])
        width = changed.pop("anchor_width", ANCHOR)
        if describe({**r["run"], "changed": changed}) == what:
            parts.setdefault(width, []).append(r)
    return dict(sorted(parts.items()))


def beyond_points(records):
    """What is kept for a class and what that gains; the gain by task; distances by age."""
    lwf = select(records, dataset="cifar100", strategy="lwf", labels="1")
    anchored = [r for r in select(lwf, row="ldc-anchor") if follows_paper(r["run"])]
    if not anchored:
        return
    whats = [r["what"] for r in anchored]
    what = max(whats, key=whats.count)  # the most seeds
    part = select(lwf, what=what)
    run = part[0]["run"]
    width = 8 * run["settings"]["width"]
    kept = [(row, width, part) for row in ("none", "sdc", "ldc", "ldc-ridge")]
    kept += [("ldc-anchor", width + k, group) for k, group in with_anchors(lwf, what).items()]
    kept += [(f"nme-{m}", 3072 * m, part) for m in (1, 5, 10, 20, 50)]
    for row, numbers, group in kept:
        shares = shares_closed(group, row)
        if shares:
            series = "NME" if row.startswith("nme") else row
            yield point(f"what is kept\n{what}", series, numbers, shares)
    for row in ("none", "sdc", "ldc", "ldc-ridge", "ldc-anchor", "oracle"):
        for t in range(1, run["tasks"] + 1):
            ours, none = (numbers_of(part, f"t{t}", row=name) for name in (row, "none"))
            gains = [ours[seed] - none[seed] for seed in ours if seed in none]
            if gains:
                yield point("task by task", row, t, gains)
    for row in ("ldc-ridge", "ldc-anchor"):
        ages = {}
        for r in select(part, row=row):
            distances = iter(r["oracle_distance"][-1])
            for age, size in zip(range(run["tasks"] - 1, 0, -1), r["run"]["task_sizes"]):
                of_task = [next(distances) for _ in range(size)]
                ages.setdefault(age, []).append(statistics.mean(of_task))
        for age in sorted(ages):
            yield point("by age", row, age, ages[age])


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
        series = {"old class": moved[0], "new task's images": new, "stale prototype": prototype}
        if moved is not points:
            torch.manual_seed(0)  # with a bias: in two dimensions a linear map alone cannot shift
            p_F = ldc.fit_projector(old, new, projector="linear+bias", epochs=1000, lr=0.1,
                                    batch_size=len(old))
            series["true mean"] = moved[0].mean(0, keepdim=True)
            series["moved by SDC"] = ldc.sdc_update(prototype, old, new, 0.3)
            series["moved by LDC"] = p_F(prototype)
        for name, part in series.items():
            yield from (point(panel, name, round(x, 3), [round(y, 3)]) for x, y in part.tolist())


# of Okabe and Ito's colours, distinct for colour-blind eyes
BLACK, GREY, BLUE, ORANGE, GREEN, PINK = "#000000 #999999 #0072B2 #D55E00 #009E73 #CC79A7".split()
STYLES = {  # matplotlib's format, colour, size of markers; a row of your own gets the next colour
    "old class": (".", BLACK, 4), "new task's images": ("1", GREY, 4),
    "stale prototype": ("v", PINK, 9), "true mean": ("*", GREEN, 15),
    "moved by SDC": ("s", BLUE, 12), "moved by LDC": ("x", ORANGE, 8),
    "no compensation": ("v:", GREY, 5), "SDC": ("--", BLUE, 0), "LDC": ("-", ORANGE, 0),
    "NME": ("s--", BLUE, 5), "joint training": ("^:", GREEN, 5), "head": ("^:", BLUE, 4),
    "none": ("v:", GREY, 5), "sdc": ("s--", BLUE, 4), "ldc": ("o-", ORANGE, 5),
    "ldc-ridge": ("D-", PINK, 4), "ldc-anchor": ("P-", GREEN, 6), "oracle": ("-.", BLACK, 0),
}
KDE_ROWS = {"none": "no compensation", "sdc": "SDC", "ldc": "LDC"}
ANCHOR = 1024  # numbers that ldc-anchor keeps for a class beside its prototype
FIGURES = {  # name -> (points, labels of the axes, which panels share a y axis, caption)
    "fig-toy": (toy_points, "", "", str, "Where the mean of an old class goes, estimated from the "
                "new task's images: SDC finds a translation, LDC (with a bias) rotation too"),
    "fig-drift": (drift_points, "tasks learnt", "accuracy in %", lambda panel: panel.split(":")[0],
                  "Accuracy on the first tasks while all are learnt, CIFAR-100; only classes of "
                  "these tasks are candidates; CaSSLe has 25 % of the labels"),
    "fig-nme": (nme_points, "stored images per class", "A_last in %", str,
                "LDC against the nearest mean of stored images (NME), LwF"),
    "fig-kde": (kde_points, "cosine distance", "density", lambda panel: "",
                "Distance of the moved prototypes of old classes to the oracle's, CIFAR-100, LwF"),
    "fig-curves": (curves_points, "tasks learnt", "accuracy in %", str,
                   "Accuracy over all classes seen; bands: deviation over seeds"),
    "fig-beyond": (beyond_points, "", "share of the gap closed in %", str,
                   "LwF on CIFAR-100: what our rows gain over LDC for what they keep; and the "
                   "distance of moved prototypes to the oracle's by the age of the class"),
}
AXES = {"what is kept": ("numbers kept for a class", None),
        "task by task": ("tasks learnt", "points above no compensation"),
        "by age": ("tasks since the class was learnt", "cosine distance to the oracle")}


def draw(points, xlabel, ylabel, group):
    """A panel for each value of "panel", in it a curve for each series; one legend below."""
    from matplotlib.figure import Figure
    panels, handles, tops = values_of(points, "panel"), {}, {}
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 2.9 * columns, 0.7 + 3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels):
        for series in values_of(select(points, panel=panel), "series"):
            curve = select(points, panel=panel, series=series)
            x, y, deviation = ([p[key] for p in curve] for key in ("x", "y", "deviation"))
            form, colour, size = STYLES.get(series, (".-", f"C{len(handles)}", 5))
            handles[series], = axis.plot(
                x, y, form, color=colour, markersize=size, markeredgewidth=1.5,
                markerfacecolor="none" if form == "s" else colour)
            low, high = ([a + sign * b for a, b in zip(y, deviation)] for sign in (-1, 1))
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        kind = panel.split("\n")[0]
        names = AXES.get(kind, (xlabel, ylabel))
        axis.set(xlabel=names[0], ylabel=names[1] or ylabel)
        wrapped = [part for line in panel.split("\n") for part in textwrap.wrap(line, 42)]
        axis.set_title("\n".join(wrapped), fontsize=8)
        axis.grid(alpha=0.3)
        if kind == "what is kept":
            axis.set_xscale("log")
        if ylabel:
            tops.setdefault(group(panel), []).append(axis)
        else:  # the toy's two dimensions
            axis.set_aspect("equal", "datalim")
    for sharing in tops.values():
        limits = [axis.get_ylim() for axis in sharing]
        for axis in sharing:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    for axis in axes[len(panels):]:
        axis.remove()
    figure.legend(handles.values(), handles, loc="outside lower center", ncol=7, fontsize=8)
    return figure


def make_figure(name, records, folder, scale):
    """Markdown of one figure, whose CSV and PNG are written where its points are new."""
    points_of, *how, caption = FIGURES[name]
    place = f"{scale}/figures/{name}"
    table, picture = folder / f"{place}.csv", folder / f"{place}.png"
    try:
        points = list(points_of(records))
        if not points:
            return [f"**{name}.** Not run.", ""]
        lines = [points[0], *(p.values() for p in points)]
        text = "".join(",".join(str(cell).replace(",", ";").replace("\n", " ") for cell in line)
                       + "\n" for line in lines)
        # another matplotlib draws other bytes; delete the PNG to draw it again
        if not (picture.exists() and table.exists() and table.read_text() == text):
            table.parent.mkdir(parents=True, exist_ok=True)
            table.write_text(text, newline="\n")
            draw(points, *how).savefig(picture, dpi=110)
    except ModuleNotFoundError as error:
        return [f"**{name}.** Not drawn: {error.name} is missing (pip install {error.name}).", ""]
    numbers = f"Numbers: [CSV]({place}.csv)."
    return [f"**{name}.** {caption}. {numbers}", "", f"![{name}]({place}.png)", ""]


# --------------------------------------------------------------------------------------------------
# The documents, and the command line

REMARKS = {
    "paper": "Every setting as the paper has it.",
    "small": "Real data, but a narrower network or shorter schedules than the paper's: only rows "
             "on one backbone can be compared. The paper's values are there for orientation. "
             "Figures show the widest network.",
    "demo": "A narrow network and short schedules, for a first look.",
    "smoke": "A test that everything runs, on a few images: the numbers mean nothing.",
}
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def section(scale, runs, only, folder):
    """Markdown of one scale: the paper's tables, figures, all rows, what was run."""
    records = records_of([run for run in runs if run["finished"]])
    fitting = [r for r in records if follows_paper(r["run"])]
    others = [r for r in records if r["dataset"] in DATASETS and not follows_paper(r["run"])]
    drawn = " Images are generated." if any(
        run["dataset"] == "demo" or run.get("generated") for run in runs) else ""
    text = [f"## Scale {scale}", "", REMARKS[scale] + drawn,
            "Accuracy in %: mean ± sample standard deviation (number of seeds).", ""]
    for name in (name for name in TABLES if name in only and fitting):
        text += paper_table(*TABLES[name], fitting)
    if others:
        names = "; ".join(experiments(others))
        text += [f"Not the paper's protocol, so not in its tables: {names}.", ""]
    for name in (name for name in FIGURES if name in only and (records or only == ["fig-toy"])):
        text += make_figure(name, records, folder, scale)
    if records:
        for title, value, wanted in WIDE_TABLES:
            text += folded(title, row_table(records, value, wanted))
    return text + folded("What was run", runs_table(runs)) if runs else text


WIDE_TABLES = (
    ("All rows, A_last", average, ".*"),
    ("All rows, A_inc", functools.partial(average, metric="A_inc"), ".*"),
    ("All rows, forgetting", functools.partial(average, metric="forgetting"), ".*"),
    ("Share of the gap closed, (row - none) / (oracle - none), in %; the oracle has all labels",
     gap_closed, COMPENSATORS))


def folded(title, lines):
    return ["<details>", f"<summary><b>{title}.</b></summary>", "", *lines, "</details>", ""]


def short_table(runs):
    """README.md's table: LwF on CIFAR-100, the paper's row first, ours below."""
    rows = {"none": "no compensation", "sdc": "SDC", "ldc": "LDC", "ldc-anchor": "`ldc-anchor`",
            "ldc-anchor+lda": "`ldc-anchor+lda`", "oracle": "oracle"}
    lwf = words_of("cifar100 lwf")
    cells = [("", row, {**lwf, "row": row}, paper_value(lwf, row)) for row in rows]
    shown = [run for run in runs if run["finished"] and follows_paper(run)]
    table = fill(cells, records_of(shown))
    lines = [[whose, *(values.get(row, "") for row in rows)]
             for (_, whose), values in table.items()]
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
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder",
                        help="runs or results; the first one's README.md is written, and for "
                        "results/ the table in the README.md beside it")
    parser.add_argument("--scale", choices=REMARKS, help="only this scale (default: all)")
    names = [*TABLES, *FIGURES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"only these, of {' '.join(names)} (default: all)")
    parser.add_argument("--latex", action="store_true", help="print tables for a paper, write "
                        "nothing")
    args = parser.parse_args(argv)
    try:
        text = write_report(args)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(text))
    failed = [line for line in text if "Not drawn: " in line]
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def write_report(args):
    """Lines of Markdown, also written to README.md; or of LaTeX, printed only."""
    folder = args.folders[0]
    runs = [run for run in load(*args.folders) if args.scale in (None, run["scale"])]
    if not runs and not (args.scale and args.only == ["fig-toy"]):  # which needs no run
        raise OSError(f"{folder} holds no runs at {args.scale or 'any'} scale: expected "
                      "<scale>/<data set>/<strategy>/seed<k>/result.json there.")
    if args.latex:
        return [latex_table(records_of([run for run in runs if run["finished"]]))]
    text = []
    for scale in [args.scale] if args.scale else REMARKS:
        part = [run for run in runs if run["scale"] == scale]
        if part or args.scale:
            text += section(scale, part, args.only, folder)
    refresh(folder / "README.md", "\n".join(text))
    if folder.resolve().name == "results" and not args.scale:
        refresh(folder.resolve().parent / "README.md", short_table(runs))
    return text


if __name__ == "__main__":
    sys.exit(main())
