"""A backbone learns one task: backbones, heads, losses, and one small class per strategy.

A strategy has `learn(task)` and `snapshot()`, the frozen feature extractor f_t that everything post hoc reads
(prototypes, drift compensation, evaluation). Strategies with a classifier of their own also have `predict(images)`.
To add one: write a class, enter it in STRATEGIES, give it its settings in PRESETS.
"""
import contextlib
import copy
import math
import time
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import UserError

# ------------------------------------------------------------------------------------------------------------------
# Settings: every value with its source. P paper, S its supplement, ldc the authors' code; a flag overrides any of them.

SETTINGS = {  # name -> help text of the flag
    "backbone": "resnet18 (the paper's), or any torchvision classification model by name",
    "stem": "first layer of resnet18: cifar, imagenet (3x3 and max-pool, the authors'), standard (7x7, half the resolution)",
    "width": "channels of resnet18's first stage; features have 8 times as many",
    "batch_size": "images per step",
    "first_epochs": "epochs on the first task",
    "epochs": "epochs on every later task",
    "first_lr": "learning rate on the first task",
    "lr": "learning rate on every later task",
    "momentum": "SGD momentum",
    "first_weight_decay": "weight decay on the first task",
    "weight_decay": "weight decay on every later task",
    "first_milestones": "epochs after which the first task's learning rate falls tenfold",
    "milestones": "the same for every later task",
    "lambda_kd": "weight of LwF's distillation term",
    "temperature": "softmax temperature of LwF's distillation term",
}

SGD = dict(  # P "Training procedure", S "LwF"; ldc models/lwf.py
    backbone="resnet18", stem="cifar", width=64, batch_size=128, momentum=0.9,
    first_epochs=200, first_lr=0.1, first_weight_decay=5e-4,
    first_milestones=(60, 120, 160),  # differs: S says 180; P and ldc say 160
    epochs=100, lr=0.05, milestones=(45, 90),
    weight_decay=2e-4,  # ldc only; the paper is silent after task 1
)
SGD_BY_DATASET = {
    "tinyimagenet": dict(lr=0.001),  # S
    "imagenet100": dict(stem="imagenet"),  # ldc convs/resnet.py; four times the work of the standard stem
    "cars": dict(stem="standard"),
}
LWF = dict(SGD, lambda_kd=10.0, temperature=2.0)  # P, S
PRESETS = {  # strategy -> data set -> settings; "*" holds what all data sets share
    "finetune": {"*": SGD, **SGD_BY_DATASET},
    "lwf": {"*": LWF, **SGD_BY_DATASET, "imagenet100": dict(stem="imagenet", lambda_kd=5.0)},  # S: lambda 5
    "joint": {"*": SGD, **SGD_BY_DATASET},
}

SCALES = {  # one rule for every strategy: epochs, milestones and warm-ups shrink by a factor, width and batch are capped
    "paper": dict(first_epochs=1.0, epochs=1.0, width=64, batch_size=1024),
    "small": dict(first_epochs=0.25, epochs=0.15, width=16, batch_size=1024),
    "demo": dict(first_epochs=0.2, epochs=0.2, width=8, batch_size=32),
    "smoke": dict(first_epochs=0.01, epochs=0.01, width=8, batch_size=32),
}


def resolve_settings(strategy, dataset, scale, overrides):
    """Preset for (strategy, data set), shrunk to the scale, then the user's flags: flag > preset > default."""
    rule, settings = SCALES[scale], {**PRESETS[strategy]["*"], **PRESETS[strategy].get(dataset, {})}
    for name, value in settings.items():
        factor = rule["first_epochs" if name.startswith("first_") else "epochs"]
        if name.endswith("epochs"):
            settings[name] = max(1, round(value * factor))
        elif name.endswith("milestones"):
            settings[name] = tuple(max(1, round(m * factor)) for m in value)
        elif name in ("width", "batch_size"):
            settings[name] = min(value, rule[name])
    unknown = [name for name in overrides if name not in settings]
    if unknown:
        raise UserError(f"strategy {strategy} has no setting --{unknown[0].replace('_', '-')}; "
                        f"it has {', '.join('--' + n.replace('_', '-') for n in settings)}.")
    return {**settings, **overrides}


# ------------------------------------------------------------------------------------------------------------------
# Backbones

STEMS = {  # kernel, stride, padding, max-pool
    "cifar": (3, 1, 1, False),  # CIFAR-100 and Tiny-ImageNet
    "imagenet": (3, 1, 1, True),  # the authors' ImageNet100 stem: layer 1 runs at half the image size
    "standard": (7, 2, 3, True),  # torchvision's
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; ends in ReLU, so features are never negative."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                                          nn.BatchNorm2d(channels))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """ResNet-18 without its classifier: images (B, 3, H, W) -> features (B, 8 * width)."""

    def __init__(self, width=64, stem="cifar"):
        super().__init__()
        kernel, stride, padding, pool = STEMS[stem]
        self.conv1 = nn.Conv2d(3, width, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()
        stages, channels_in = [], width
        for stage in range(4):
            channels = width * 2 ** stage
            stages += [BasicBlock(channels_in, channels, 1 if stage == 0 else 2), BasicBlock(channels, channels, 1)]
            channels_in = channels
        self.blocks = nn.Sequential(*stages)
        self.dim = channels_in
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        return self.blocks(x).mean((2, 3))


def torchvision_backbone(name, image_size):
    """Any torchvision classifier by name, its last linear layer replaced by the identity, so that it returns features."""
    import torchvision.models as models
    if name not in models.list_models(module=models):
        raise UserError(f"--backbone {name} is not a torchvision classification model; expected resnet18, "
                        f"or a name such as {', '.join(models.list_models(module=models)[:40:8])}.")
    model = models.get_model(name, weights=None, **({"image_size": image_size} if name.startswith("vit") else {}))
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise UserError(f"--backbone {name} has no linear classifier to take off; choose another backbone.")
    parent, _, leaf = linear[-1].rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Identity())
    model.eval()
    with torch.no_grad():
        features = model(torch.zeros(2, 3, image_size, image_size))
    if not (torch.is_tensor(features) and features.ndim == 2):
        raise UserError(f"--backbone {name} does not return one feature vector per image; choose another backbone.")
    model.dim = features.shape[1]
    return model


def build_backbone(settings, image_size):
    """The backbone the settings name, with its feature width in `.dim`."""
    if settings.backbone == "resnet18":
        if settings.stem not in STEMS:
            raise UserError(f"--stem {settings.stem} is unknown; expected one of {', '.join(STEMS)}.")
        return ResNet18(settings.width, settings.stem)
    return torchvision_backbone(settings.backbone, image_size)


# ------------------------------------------------------------------------------------------------------------------
# Heads and losses

class CosineHead(nn.Module):
    """Logits sigma * cos(f, w_c) with one learnable sigma; grows by rows and keeps what it has learnt (ldc)."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.sigma = nn.Parameter(torch.ones(1))

    def grow(self, classes):
        """Append fresh rows until there are `classes` of them."""
        dim, bound = self.weight.shape[1], 1 / math.sqrt(self.weight.shape[1])
        fresh = torch.empty(classes - len(self.weight), dim).uniform_(-bound, bound)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), fresh.to(self.weight)]))

    def forward(self, feats):
        return self.sigma * F.linear(F.normalize(feats, dim=1), F.normalize(self.weight, dim=1))


def lwf_loss(logits, old_logits, labels, lambda_kd=10.0, temperature=2.0):
    """LwF: cross-entropy on the new classes' logits plus distillation of all old ones (paper section 3.3).

    logits: (B, C_old + C_new); old_logits: (B, C_old) of the frozen network; labels: (B,) in [C_old, C_old + C_new).
    """
    known = old_logits.shape[1]
    # differs: the paper writes cross-entropy over all classes; the authors' code, and we, over the new ones only
    ce = F.cross_entropy(logits[:, known:], labels - known)
    # no factor T^2: with it, lambda = 10 would act as 40
    kd = -(F.softmax(old_logits / temperature, 1) * F.log_softmax(logits[:, :known] / temperature, 1)).sum(1).mean()
    return ce + lambda_kd * kd


# ------------------------------------------------------------------------------------------------------------------
# Training

class Monitor:
    """Seconds per phase, images trained on, and the stop on a non-finite loss; no step waits for the device.

    `on_step(images)` is called after every step, `on_epoch(task, epoch, loss)` after every epoch.
    """

    def __init__(self):
        self.seconds, self.images = defaultdict(float), 0
        self.on_step, self.on_epoch = lambda images: None, lambda task, epoch, loss: None

    @contextlib.contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def batches(self, iterable):
        """The iterable, the time it takes counted as "augment"."""
        iterator = iter(iterable)
        while True:
            with self.phase("augment"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def step(self, images):
        self.images += images
        self.on_step(images)

    def epoch(self, task, epoch, losses):
        """End of an epoch, the only place where the losses are looked at."""
        losses = torch.stack(losses)
        finite = torch.isfinite(losses)
        if not finite.all():
            step = int(finite.long().argmin())
            raise UserError(f"The loss became {losses[step].item()} in task {task + 1}, epoch {epoch + 1}, "
                            f"step {step + 1}; a lower --lr or --first-lr usually helps.")
        self.on_epoch(task, epoch, losses.mean().item())


def frozen(module):
    """A copy in eval mode that no gradient reaches."""
    return copy.deepcopy(module).eval().requires_grad_(False)


FIRST_TASK = "sgd", ("backbone", "stem", "width", "batch_size", "momentum", "first_epochs", "first_lr", "first_weight_decay",
                     "first_milestones")


class Strategy:
    """A backbone that learns task after task; subclasses say what changes before and after a task, and give the loss.

    `memory` holds what a method keeps between tasks beside its networks (prototypes, covariances): tensors and numbers.
    """

    reads_old_tasks = False  # True only for methods that are not exemplar-free
    label_fractions = (1.0,)  # shares of labelled images that prototypes are made from
    first_task = FIRST_TASK  # strategies with the same recipe and settings learn the same first task, and share it

    def __init__(self, settings, image_size, *, seed=0, device="cpu", amp=False, compile=False):
        torch.manual_seed(seed)
        self.settings, self.seed, self.device, self.amp = SimpleNamespace(**settings), seed, torch.device(device), amp
        backbone = build_backbone(self.settings, image_size)
        self.net = nn.ModuleDict({"backbone": backbone, **self.build_heads(backbone.dim)})
        # channels-last pays on the CPU too: 1.1-1.9 times the images per second at width 16
        self.net.to(self.device, memory_format=torch.channels_last)
        self.forward = torch.compile(backbone) if compile else backbone
        self.memory, self.monitor, self.dim = {}, Monitor(), backbone.dim

    def build_heads(self, dim):
        return {"head": CosineHead(dim)}

    # What happens in a task

    def learn(self, task):
        """f_{t-1} -> f_t with a fresh optimiser and schedule; the last epoch's weights are kept."""
        # one seed per (run, task): a run resumed at task t draws what an undisturbed one draws
        torch.manual_seed(self.seed * 1000 + task.index)
        self.start(task)
        self.fit(task, *self.optimizer(task), self.epochs(task.index))
        self.finish(task)

    def start(self, task):
        self.net["head"].grow(task.classes.stop)
        self.net.train()

    def finish(self, task):
        pass

    def epochs(self, index):
        return self.settings.first_epochs if index == 0 else self.settings.epochs

    def optimizer(self, task):
        """SGD with step decay, in one parameter group: weight decay reaches batch-norm and sigma too (ldc)."""
        s, first = self.settings, task.index == 0
        optimizer = torch.optim.SGD(self.net.parameters(), lr=s.first_lr if first else s.lr, momentum=s.momentum,
                                    weight_decay=s.first_weight_decay if first else s.weight_decay)
        milestones = s.first_milestones if first else s.milestones
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, list(milestones), 0.1)

    def batches(self, task, generator):
        """One epoch of what `loss` takes."""
        return task.epoch(self.settings.batch_size, generator)

    def loss(self, x, y):
        raise NotImplementedError

    def fit(self, task, optimizer, scheduler, epochs):
        """Plain training: `epochs` epochs of augmented batches through `self.loss`."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + task.index)
        for epoch in range(epochs):
            losses = []
            for batch in self.monitor.batches(self.batches(task, generator)):
                with self.monitor.phase("step"):
                    loss = self.loss(*batch)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                losses.append(loss.detach())
                self.monitor.step(len(batch[0]))
            scheduler.step()
            self.monitor.epoch(task.index, epoch, losses)

    # Forward passes: convolutions in bfloat16 where amp is on; features, heads and losses in float32

    def embed(self, x, backbone=None):
        """Normalised images (B, 3, H, W) -> features (B, d), by the network in training unless another one is given."""
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return (backbone or self.forward)(x).float()

    def snapshot(self):
        """The frozen feature extractor f_t: a copy in eval mode, which later training cannot touch."""
        backbone = frozen(self.net["backbone"])
        return lambda x: self.embed(x, backbone)

    @torch.no_grad()
    def features(self, images):
        """Features of normalised images in the current space, (B, d)."""
        return self.snapshot()(images)

    # What a checkpoint holds: tensors, numbers and strings only, so that weights_only=True loads it

    def state(self):
        return {"classes": len(self.net["head"].weight), "net": self.net.state_dict(), "memory": self.memory}

    def load_state(self, state):
        self.net["head"].grow(state["classes"])
        self.net.load_state_dict(state["net"])
        self.memory = state["memory"]


class Finetune(Strategy):
    """Cross-entropy on the current task's logits, and nothing to hold old features in place."""

    def start(self, task):
        super().start(task)
        self.known = task.classes.start

    def loss(self, x, y):
        return F.cross_entropy(self.net["head"](self.embed(x))[:, self.known:], y - self.known)


class LwF(Finetune):
    """Learning without forgetting with a cosine head: the backbone of Table 1's LwF rows."""

    def start(self, task):
        self.teacher = frozen(self.net) if task.index else None  # the old network with its own head and sigma
        super().start(task)

    def loss(self, x, y):
        if self.teacher is None:
            return super().loss(x, y)
        with torch.no_grad():
            old_logits = self.teacher["head"](self.embed(x, self.teacher["backbone"]))
        return lwf_loss(self.net["head"](self.embed(x)), old_logits, y, self.settings.lambda_kd, self.settings.temperature)


class Joint(Strategy):
    """Incremental joint training, the upper bound of Figure 1: every task trains on all classes so far."""

    # differs: the paper gives no recipe; we keep the weights and train on the union with the incremental settings
    reads_old_tasks = True

    def loss(self, x, y):
        return F.cross_entropy(self.net["head"](self.embed(x)), y)


STRATEGIES = {"finetune": Finetune, "lwf": LwF, "joint": Joint}
