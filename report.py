"""Result files become the paper's tables and figures, ours beside the paper's. Reads JSON files only."""
import statistics

PAPER = {  # (data set, strategy, row) -> (A_last, A_inc), Table 1
    ("cifar100", "lwf", "none"): (40.5, 56.2), ("tinyimagenet", "lwf", "none"): (28.6, 44.2), ("imagenet100", "lwf", "none"): (44.0, 64.4),
    ("cifar100", "lwf", "sdc"): (40.6, 56.2), ("tinyimagenet", "lwf", "sdc"): (29.5, 43.8), ("imagenet100", "lwf", "sdc"): (42.6, 65.3),
    ("cifar100", "lwf", "ldc"): (45.4, 59.5), ("tinyimagenet", "lwf", "ldc"): (34.2, 46.8), ("imagenet100", "lwf", "ldc"): (51.4, 69.4),
}
ROWS = ("head", "none", "sdc", "sdc-unit", "ldc", "adc", "nme-20", "oracle")
OURS = ("ldc-ridge", "ldc-ridge+lda", "oracle+lda")


def spread(values, digits=1):
    """Mean, and the sample standard deviation where there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def label_text(label_set):
    """Words for a label set: "0.05", "0.05@7" (drawn again with seed 7), "n50" (50 images of each class)."""
    share, _, seed = label_set.partition("@")
    text = f"{share[1:]} labels of each class" if share[0] == "n" else f"{100 * float(share):g} % of the labels"
    return text + (f", draw {seed}" if seed else "")


def run_table(results):
    """The table at the end of a run: one line per compensator, its accuracy after every task, A_last, A_inc, the paper's."""
    first = results[0]
    tasks = min(r["tasks_done"] for r in results)
    lines = []
    for fraction in first["rows"]:
        rows = [r["rows"][fraction] for r in results]
        share = "" if fraction == "1" else f", {label_text(fraction)}"
        lines += ["", f"{first['dataset']}, {first['strategy']}, scale {first['scale']}{share}: accuracy in % over all classes seen, "
                      f"{len(results)} seed{'s' * (len(results) > 1)}"]
        header = ["", *(f"t{t + 1}" for t in range(tasks)), "A_last", "A_inc", "paper A_last / A_inc"]
        body = [table_line(name, rows, tasks, first) for name in ROWS if name in rows[0]]
        ours = [table_line(name, rows, tasks, first) for name in OURS if name in rows[0]]
        widths = [max(len(line[i]) for line in [header, *body, *ours]) for i in range(len(header))]
        text = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
                for line in [header, *body, *ours]]
        rule = "-" * max(map(len, text))
        lines += [text[0], rule, *text[1:1 + len(body)], *([rule] if ours else []), *text[1 + len(body):]]
    return "\n".join(lines)


def table_line(name, rows, tasks, run):
    curves = [row[name]["accuracy"] for row in rows]
    paper = PAPER.get((run["dataset"], run["strategy"], name))
    return [name, *(f"{statistics.mean(c[t] for c in curves):.1f}" for t in range(tasks)),
            spread([row[name]["A_last"] for row in rows]), spread([row[name]["A_inc"] for row in rows]),
            "{} / {}".format(*paper) if paper else ""]
