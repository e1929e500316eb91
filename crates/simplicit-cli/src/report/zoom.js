// Zooms the patterns together; without it they are shown to fit.
(() => {
  const views = [...document.querySelectorAll(".view")];
  const controls = document.querySelector(".controls");
  if (!views.length || !controls) return;
  const factors = [0, 1, 2, 4, 8, 16];
  let level = 0;
  controls.hidden = false;
  const show = (next) => {
    const factor = factors[next];
    const centres = views.map((v) => [
      (v.scrollLeft + v.clientWidth / 2) / v.scrollWidth,
      (v.scrollTop + v.clientHeight / 2) / v.scrollHeight,
    ]);
    level = next;
    views.forEach((v, k) => {
      const img = v.querySelector("img");
      v.classList.toggle("zoomed", factor > 0);
      img.style.width = factor > 0 ? img.getAttribute("width") * factor + "px" : "";
      v.scrollLeft = centres[k][0] * v.scrollWidth - v.clientWidth / 2;
      v.scrollTop = centres[k][1] * v.scrollHeight - v.clientHeight / 2;
    });
    controls.querySelector("output").textContent = factor > 0 ? factor + " ×" : "fit";
    controls.querySelector("[data-step='-1']").disabled = level === 0;
    controls.querySelector("[data-step='1']").disabled = level === factors.length - 1;
  };
  const step = (by) => show(by === 0 ? 0 : Math.min(Math.max(level + by, 0), factors.length - 1));
  controls.addEventListener("click", (e) => {
    const by = e.target.dataset.step;
    if (by !== undefined) step(Number(by));
  });
  views.forEach((v) => {
    v.addEventListener("keydown", (e) => {
      const by = { "+": 1, "=": 1, "-": -1, "0": 0 }[e.key];
      if (by !== undefined && !e.ctrlKey && !e.metaKey) { step(by); e.preventDefault(); }
    });
    v.addEventListener("scroll", () => {
      for (const other of views) {
        if (other !== v && (other.scrollLeft !== v.scrollLeft || other.scrollTop !== v.scrollTop)) {
          other.scrollTo(v.scrollLeft, v.scrollTop);
        }
      }
    });
    v.addEventListener("dblclick", () => step(1));
    v.addEventListener("pointerdown", (e) => {
      if (e.pointerType !== "mouse" || level === 0) return;
      const start = [e.clientX + v.scrollLeft, e.clientY + v.scrollTop];
      const move = (m) => v.scrollTo(start[0] - m.clientX, start[1] - m.clientY);
      const stop = () => removeEventListener("pointermove", move);
      addEventListener("pointermove", move);
      addEventListener("pointerup", stop, { once: true });
      e.preventDefault();
      v.focus();
    });
  });
  show(0);
})();
