"""What the feedback of a FashionMNIST model does: its cycles, and the accuracy without them.

    python bench/feedback.py MODEL [MODEL ...]

A weight is feedback where a state reads itself or a later layer's state: on or below the diagonal of A, states running from
the last layer to the first. Needs the package and SciPy.
"""

import sys

import numpy as np
import page
import scipy.sparse

import simplicit

sys.path.insert(0, str(page.ROOT / "python/tests"))
from conftest import idx  # noqa: E402


def accuracy(model, images, labels):
    return 100 * np.mean(model.predict(images).argmax(1) == labels)


def main():
    images = idx("fashion_test_images.idx.gz")
    images, labels = images.reshape(len(images), -1), idx("fashion_test_labels.idx.gz")
    print("| model | sparsity % | λ_pf of \\|A\\| | feedback weights | of these self-loops | accuracy % | without feedback % |")
    print("|---|---|---|---|---|---|---|")
    for path in sys.argv[1:]:
        model = simplicit.ImplicitModel.load(path)
        a = model.A
        forward = scipy.sparse.triu(a, 1, format="csr")
        cut = simplicit.ImplicitModel.from_arrays(
            forward, model.B, model.C, model.D, model.b, model.d, layout=model.layout, preprocessing=model.preprocessing
        )
        largest = np.abs(np.linalg.eigvals(abs(a).toarray())).max()
        cells = [
            path,
            f"{100 * model.sparsity().sparsity:.1f}",
            f"{largest:.3f}",
            a.nnz - forward.nnz,
            np.count_nonzero(a.diagonal()),
            f"{accuracy(model, images, labels):.2f}",
            f"{accuracy(cut, images, labels):.2f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
