"""Beyond the paper, on torch and ldc.py alone: a whitened read-out (lda) and ADC."""
from dataclasses import dataclass

import torch

from ldc import PrototypeStore, class_means, moved_by, ncm, to_float64

# lda: nearest mean after whitening with one covariance, which is moved like the prototypes.


def within_class_scatter(feats, labels, classes):
    """Sum of (f - mean)(f - mean)^T over all images, each around its class's mean: (d, d)."""
    classes = torch.as_tensor(list(classes), device=labels.device)
    position = (labels[:, None] == classes).to(torch.int64).argmax(1)  # classes in any order
    centred = to_float64(feats - class_means(feats, labels, classes)[position])
    return centred.T @ centred


@dataclass
class ScatterStore(PrototypeStore):
    """Prototypes, and one within-class scatter S pooled over all classes."""
    scatter: torch.Tensor | float = 0.0  # S, (d, d) in float64
    images: int = 0  # behind it

    def add(self, feats, labels, classes):
        """Append the means of new classes, and pool their scatter around these means."""
        super().add(feats, labels, classes)
        self.scatter = self.scatter + within_class_scatter(feats, labels, classes)
        self.images += len(feats)

    def vectors(self):
        """Prototypes (C, d), then a factor R (d, d) with R^T R = S, whose rows move likewise.

        A linear map W moves S exactly: (R W)^T (R W) = W^T S W.
        """
        # not Cholesky: dead ReLU units make the scatter singular
        values, vectors = torch.linalg.eigh(self.scatter)
        factor = values.clamp(min=0).sqrt()[:, None] * vectors.T
        return torch.cat([self.means, factor.to(self.means)])

    def move(self, update):
        """Replace prototypes and scatter by what a linear update makes of them."""
        if self.means is not None:
            moved = moved_by(update, self.vectors())
            self.means, factor = moved.split([len(self.means), len(moved) - len(self.means)])
            factor = to_float64(factor)
            self.scatter = factor.T @ factor

    def covariance(self):
        """Pooled within-class covariance, (d, d) in float64."""
        return self.scatter / self.images


def lda(feats, prototypes, covariance, shrink=1.0):
    """Ours: cosine NCM after whitening with one pooled covariance (d, d) -> class indices (N,)."""
    # clamped: one labelled image a class has no scatter, and this is plain NCM
    level = (shrink * covariance.diagonal().mean()).clamp(min=1e-6)
    eye = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance + level * eye)).T.to(feats)
    return ncm(feats @ whiten, prototypes @ whiten)


# ADC: adversarial drift compensation (CVPR 2024), a rival that users expect.


def adc_update(prototypes, images, old_model, new_model, *, feats_old=None, alpha=25.0, steps=3,
               nearest=100, limits=None, batch_size=512):
    """ADC: perturb images until the old network takes them for an old class, use their drift.

    prototypes (C, d); images (N, 3, H, W), or what returns them when indexed; feats_old (N, d)
    their old features; limits: smallest and largest pixel; several classes share a batch.
    """
    with torch.no_grad():
        feats_old = old_model(images) if feats_old is None else feats_old
        distance = torch.cdist(prototypes, feats_old, compute_mode="donot_use_mm_for_euclid_dist")
    candidates = distance.topk(min(nearest, distance.shape[1]), largest=False).indices  # (C, m)
    low, high = limits or (images.min().item(), images.max().item())
    moved = []  # differs: the authors overwrite prototypes that later classes are compared with
    for index in torch.arange(len(prototypes)).split(max(1, batch_size // candidates.shape[1])):
        group = index.to(prototypes.device)
        clean = images[candidates[group].flatten()]  # (k m, 3, H, W)
        targets = prototypes[group]
        attacked = attack(clean, targets, old_model, alpha, steps, low, high)
        with torch.no_grad():
            taken_for = torch.cdist(old_model(attacked), prototypes).argmin(1).view(len(group), -1)
            found = taken_for == group[:, None]  # (k, m)
            success = found.any(1, keepdim=True)  # where no attack succeeds, clean images serve
            per_image = success.expand_as(found).reshape(-1, *[1] * (clean.ndim - 1))
            used = torch.where(per_image, attacked, clean)
            keep = torch.where(success, found, True).to(prototypes)
            drift = (new_model(used) - old_model(used)).reshape(*found.shape, -1)
            shift = (keep[:, None] @ drift).squeeze(1) / keep.sum(1, keepdim=True)
            moved.append(targets + shift)
    return torch.cat(moved)


def attack(images, prototypes, model, alpha, steps, low, high):
    """Steps of k m images towards the prototypes (k, d) of their k classes, within the pixel range.

    A step has length alpha over all images of a class.
    """
    k = len(prototypes)
    for _ in range(steps):
        images = images.detach().requires_grad_()
        with torch.enable_grad():
            difference = model(images).view(k, -1, prototypes.shape[1]) - prototypes[:, None]
            loss = difference.square().mean((1, 2)).sum()  # classes do not touch each other
            gradient, = torch.autograd.grad(loss, images)
        per_class = len(images) // k
        length = torch.stack([part.norm() for part in gradient.split(per_class)]).clamp(min=1e-12)
        length = length.repeat_interleave(per_class).view(-1, *[1] * (images.ndim - 1))
        images = (images - alpha * gradient / length).clamp(low, high).detach()
    return images
