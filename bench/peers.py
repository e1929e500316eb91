"""The same FashionMNIST problem through the peers, side by side, in one table from one run.

    python bench/peers.py [--samples 1000] [--sample-rows 6] [--beta 0.05] [--json peers.json]

Every row w = (a, b) of (A B; C D) is to minimise ½‖z − Ũᵀw‖² + β‖w‖₁ subject to ‖a‖₁ ≤ κ on state rows, the objective of
torchidl, the authors' own package. Objectives are recomputed here in double precision from what each peer returns. A peer
that would take minutes solves a sample of the rows; the table says how many. scikit-learn, celer and skglm know no
constraint: they solve the output rows alone.
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

import simplicit

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python/tests"))
from conftest import idx  # noqa: E402

KAPPA = 0.99


class Problem:
    """States of the network on some images, and what is measured about answers."""

    def __init__(self, samples, beta):
        self.network = simplicit.Network.from_onnx(ROOT / "data/fashion_fc.onnx")
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--sample-rows", type=int, default=6, help="rows for peers that would take minutes")
    parser.add_argument("--beta", type=float, default=0.05)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    problem = Problem(args.samples, args.beta)
    n, q, d = problem.n, problem.q, problem.F.shape[1]
    print(f"{args.samples} samples, {n} state rows, {q} output rows, {d} features, beta {args.beta}, kappa {KAPPA}", flush=True)
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
    results, best = [], {}
    for name, run, rows in peers:
        if args.only and name not in args.only:
            continue
        begin, cpu = time.monotonic(), cpu_seconds()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                W = np.asarray(run(problem, rows), dtype=np.float64)
        except Exception as problem_met:
            print(f"{name}: {type(problem_met).__name__}: {str(problem_met).splitlines()[0]}", flush=True)
            continue
        seconds, cpu = time.monotonic() - begin, cpu_seconds() - cpu
        values = {row: problem.objective(w, row) for row, w in zip(rows, W, strict=True)}
        norms = [np.abs(w[:n]).sum() for row, w in zip(rows, W, strict=True) if row < n]
        for row, value in values.items():
            feasible = row >= n or np.abs(W[rows.index(row), :n]).sum() <= KAPPA * (1 + 1e-6)
            if feasible:
                best[row] = min(best.get(row, np.inf), value)
        results.append(
            {
                "peer": name,
                "rows": len(rows),
                "seconds": seconds,
                "cpu_seconds": cpu,
                "cpu_seconds_per_row": cpu / len(rows),
                "values": values,
                "zeros": float(np.mean(W == 0)),
                "accuracy": problem.accuracy(W) if rows is every else None,
                "largest_norm": max(norms) if norms else None,
            }
        )
        print(f"{name}: {seconds:.1f} s for {len(rows)} rows", flush=True)
    print("\n| | rows | seconds | CPU seconds | CPU seconds a row | objective above the best | exact zeros | accuracy | κ kept |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        above = [r["values"][row] / best[row] - 1 for row in r["values"] if row in best]
        r["above_best"] = max(above)
        kept = "–" if r["largest_norm"] is None else ("yes" if r["largest_norm"] <= KAPPA else f"no, {r['largest_norm']:.6f}")
        rows = f"{r['rows']} of {n + q}" if r["rows"] < n + q else f"all {n + q}"
        accuracy = "–" if r["accuracy"] is None else f"{100 * r['accuracy']:.2f} %"
        print(
            f"| {r['peer']} | {rows} | {r['seconds']:.1f} | {r['cpu_seconds']:.1f} | {r['cpu_seconds_per_row']:.3f} "
            f"| {r['above_best']:.1e} "
            f"| {100 * r['zeros']:.1f} % | {accuracy} | {kept} |"
        )
    if args.json:
        for r in results:
            del r["values"]
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
