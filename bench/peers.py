"""The same FashionMNIST problem through the peers, side by side, in one table from one run.

    python bench/peers.py [--samples 1000] [--sample-rows 6] [--beta 0.05] [--json peers.json] [--page docs/python.md]

Every row w = (a, b) of (A B; C D) is to minimise ½‖z − Ũᵀw‖² + β‖w‖₁ subject to ‖a‖₁ ≤ κ on state rows, the objective of
torchidl, the authors' own package. Objectives are recomputed here in double precision from what each peer returns. A peer
that would take minutes solves a sample of the rows; the table says how many. scikit-learn, celer and skglm know no
constraint: they solve the output rows alone. With --page the table goes into the page between its marks.
"""

import argparse
import contextlib
import io
import json
import pathlib
import resource
import sys
import time
import warnings

import numpy as np
import page

import simplicit

sys.path.insert(0, str(page.ROOT / "python/tests"))
from conftest import idx  # noqa: E402

KAPPA = 0.99


class Problem:
    """States of the network on some images, and what is measured about answers."""

    def __init__(self, samples, beta):
        self.network = simplicit.Network.from_onnx(page.ROOT / "data/fashion_fc.onnx")
        images = idx("fashion_train_images.idx.gz")[:samples]
        self.states = self.network.states(images.reshape(len(images), -1) / 255.0)
        self.beta = beta
        self.n, self.q = self.states.Z.shape[1], self.states.Y.shape[1]
        self.F = np.hstack([self.states.X, self.states.U])
        self.T = np.hstack([self.states.Z, self.states.Y])
        test = idx("fashion_test_images.idx.gz")
        self.test = test.reshape(len(test), -1) / 255.0
        self.labels = idx("fashion_test_labels.idx.gz")

    def objective(self, w, row):
        return 0.5 * ((self.T[:, row] - self.F @ w) ** 2).sum() + self.beta * np.abs(w).sum()

    def accuracy(self, W):
        """Of the whole model on the 10,000 test images."""
        n = self.n
        model = simplicit.ImplicitModel.from_arrays(W[:n, :n], W[:n, n:], W[n:, :n], W[n:, n:], layout=self.states.layout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(np.mean(model.predict(self.test).argmax(1) == self.labels))


def ours(problem, rows):
    sim = simplicit.SIM(
        penalty="l1", beta=problem.beta, lambda1=0.5, lambda2=0.5, normalize=False, connectivity="full", kappa=KAPPA,
        rounds=1, refit=False, cascade=False,
    )  # fmt: skip
    model = sim.fit(problem.states).model_
    return np.vstack([np.hstack([model.A.toarray(), model.B.toarray()]), np.hstack([model.C.toarray(), model.D.toarray()])])


def cvxpy_with(solver):
    def run(problem, rows):
        import cvxpy as cp

        out = []
        for row in rows:
            w = cp.Variable(problem.F.shape[1])
            loss = 0.5 * cp.sum_squares(problem.T[:, row] - problem.F @ w) + problem.beta * cp.norm1(w)
            constraints = [cp.norm1(w[: problem.n]) <= KAPPA] if row < problem.n else []
            cp.Problem(cp.Minimize(loss), constraints).solve(solver=solver)
            out.append(w.value)
        return np.array(out)

    return run


def torchidl_cvx(problem, rows):
    from torchidl.sim.solvers import CVXSolver

    solver = CVXSolver(num_processes=2, batch_size=32, lambda_y=problem.beta, lambda_z=problem.beta)
    return torchidl(solver, problem, rows)


def torchidl_admm(problem, rows):
    from torchidl.sim.solvers import ADMMSolver

    solver = ADMMSolver(lambda_y=problem.beta, lambda_z=problem.beta)
    return torchidl(solver, problem, rows)


def torchidl(solver, problem, rows):
    """Their whole interface takes all features and any number of targets."""
    import torch

    states, n = problem.states, problem.n
    z = [r for r in rows if r < n]
    y = [r - n for r in rows if r >= n]
    f32 = [np.ascontiguousarray(a.T, dtype=np.float32) for a in (states.X, states.U, states.Z[:, z], states.Y[:, y])]
    config = {"activation_fn": torch.relu, "device": "cpu", "atol": 1e-6, "kappa": KAPPA}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        A, B, C, D = (np.asarray(m.toarray() if hasattr(m, "toarray") else m) for m in solver.solve(*f32, config))
    return np.vstack([np.hstack([A, B]), np.hstack([C, D])])


def sklearn(problem, rows):
    from sklearn.linear_model import Lasso

    model = Lasso(alpha=problem.beta / len(problem.F), fit_intercept=False, tol=1e-6, max_iter=100_000)
    return np.array([model.fit(problem.F, problem.T[:, row]).coef_.copy() for row in rows])


def celer(problem, rows):
    from celer import Lasso

    model = Lasso(alpha=problem.beta / len(problem.F), fit_intercept=False, tol=1e-6)
    F = np.asfortranarray(problem.F)
    return np.array([model.fit(F, problem.T[:, row]).coef_.copy() for row in rows])


def skglm(problem, rows):
    from skglm import Lasso

    model = Lasso(alpha=problem.beta / len(problem.F), fit_intercept=False, tol=1e-6)
    F = np.asfortranarray(problem.F)
    return np.array([model.fit(F, problem.T[:, row]).coef_.copy() for row in rows])


def cpu_seconds():
    """Of this process and its children: what other work on the machine does not change."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def measured(name, run, rows, problem):
    """One peer on its rows; None, and why on stderr, if it is not there or fails."""
    begin, cpu = time.monotonic(), cpu_seconds()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            W = np.asarray(run(problem, rows), dtype=np.float64)
    except Exception as met:
        print(f"{name}: {type(met).__name__}: {str(met).splitlines()[0] if str(met) else ''}", file=sys.stderr, flush=True)
        return None
    seconds, cpu = time.monotonic() - begin, cpu_seconds() - cpu
    print(f"{name}: {seconds:.1f} s for {len(rows)} rows", file=sys.stderr, flush=True)
    n = problem.n
    norms = {row: float(np.abs(w[:n]).sum()) for row, w in zip(rows, W, strict=True) if row < n}
    return {
        "peer": name,
        "rows": len(rows),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "values": {row: problem.objective(w, row) for row, w in zip(rows, W, strict=True)},
        "norms": norms,
        "zeros": float(np.mean(W == 0)),
        "accuracy": problem.accuracy(W) if len(rows) == len(problem.T[0]) else None,
    }


def best_of(results):
    """The smallest objective of every row, over answers that keep the constraint to 1e-6."""
    best = {}
    for r in results:
        for row, value in r["values"].items():
            if r["norms"].get(row, 0) <= KAPPA * (1 + 1e-6):
                best[row] = min(best.get(row, np.inf), value)
    return best


def markdown(results, problem):
    """The table."""
    best, every = best_of(results), problem.n + problem.q
    lines = []
    for r in results:
        largest = max(r["norms"].values(), default=None)
        kept = "–" if largest is None else ("yes" if largest <= KAPPA else f"no, {largest:.6f}")
        r["above_best"] = max(value / best[row] - 1 for row, value in r["values"].items() if row in best)
        lines.append(
            (
                r["peer"],
                f"{r['rows']} of {every}" if r["rows"] < every else f"all {every}",
                f"{r['seconds']:.1f}",
                f"{r['cpu_seconds']:.1f}",
                f"{r['cpu_seconds'] / r['rows']:.3f}",
                f"{r['above_best']:.1e}",
                f"{100 * r['zeros']:.1f} %",
                "–" if r["accuracy"] is None else f"{100 * r['accuracy']:.2f} %",
                kept,
            )
        )
    return page.table(
        ("", "rows", "seconds", "CPU seconds", "CPU seconds a row", "objective above the best", "exact zeros", "accuracy", "κ kept"),
        lines,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--sample-rows", type=int, default=6, help="rows for peers that would take minutes")
    parser.add_argument("--beta", type=float, default=0.05)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path, help="write the table into this page")
    args = parser.parse_args()
    problem = Problem(args.samples, args.beta)
    n, q, d = problem.n, problem.q, problem.F.shape[1]
    every, outputs = list(range(n + q)), list(range(n, n + q))
    step = max(1, n // max(1, args.sample_rows - 2))
    sample = [*range(0, n, step)][: args.sample_rows - 2] + outputs[:2]
    peers = [
        ("simplicit", ours, every),
        ("torchidl ADMM", torchidl_admm, sample),
        ("torchidl CVX", torchidl_cvx, sample),
        ("CVXPY + Clarabel", cvxpy_with("CLARABEL"), sample),
        ("CVXPY + SCS", cvxpy_with("SCS"), sample),
        ("scikit-learn", sklearn, outputs),
        ("celer", celer, outputs),
        ("skglm", skglm, outputs),
    ]
    asked = [peer for peer in peers if not args.only or peer[0] in args.only]
    results = [r for r in (measured(*peer, problem) for peer in asked) if r is not None]
    text = (
        f"`{page.command()}`: {args.samples} samples, {n} state rows, {q} output rows, {d} features, β = {args.beta}, "
        f"κ = {KAPPA}; {page.machine()}.\n\n{markdown(results, problem)}"
    )
    print(text)
    if args.json:
        plain = [{k: v for k, v in r.items() if k not in ("values", "norms")} for r in results]
        args.json.write_text(json.dumps(plain, indent=1) + "\n")
    if args.page:
        page.fill(args.page, "bench/peers.py", text)


if __name__ == "__main__":
    main()
