"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a"];
  const SHAPES = ["circle", "square", "up", "diamond", "down", "cross", "plus", "bar"];
  const BONUS = 0,
    RESAMPLED = 1,
    ACCEPTED = 2;
  const ORIGINS = [
    ["bonus: drawn from the target", "#56b4e9"],
    ["resampled: drawn from a residual", "#d55e00"],
    ["accepted draft", "#009e73"],
  ];
  const RAMP = ["#00204c", "#2c3e6e", "#575d6d", "#7d7c78", "#a59c74", "#d3c164", "#ffea46"];

  // ---- small helpers -------------------------------------------------------------------------

  const make = (tag, given = {}, ...children) =>
    build(document.createElement(tag), given, children);
  const draw = (tag, given = {}, ...children) =>
    build(document.createElementNS("http://www.w3.org/2000/svg", tag), given, children);
  function build(node, given, children) {
    for (const [name, value] of Object.entries(given)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }
  function unpack(text) {
    const [width, body] = text.split(":");
    const bytes = Uint8Array.from(atob(body), (sign) => sign.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const read = { 1: "getUint8", 2: "getUint16", 4: "getUint32" }[width];
    return Array.from({ length: bytes.length / width }, (_, i) => view[read](i * width, true));
  }
  const largest = (values) => (values.length ? Math.max(...values) : 0);
  const title = (run) => (manyModels ? `${run.model}: ${run.name}` : run.name) + seedOf(run);
  const manyModels = new Set(data.runs.map((run) => run.model)).size > 1;
  const manySeeds = new Set(data.runs.map((run) => run.seed)).size > 1;
  const seedOf = (run) => (manySeeds && run.seed !== null ? `, seed ${run.seed}` : "");
  const metricOf = (key) => data.metrics.find((metric) => metric.key === key);
  function colourOf(family) {
    return COLOURS[family % COLOURS.length];
  }

  // ---- what is shown -------------------------------------------------------------------------

  const state = {
    model: data.runs[0].model,
    x: null,
    y: null,
    run: 0,
    beside: null,
    hidden: new Set(),
    sort: null,
    down: false,
    kind: "metrics",
    all: false,
  };
  const first = (kind) => data.metrics.find((metric) => metric.axis === kind);
  state.x = (
    data.metrics.find((m) => m.key === "accepted_length") ||
    first("gain") ||
    data.metrics[0] ||
    {}
  ).key;
  state.y = (first("quality") || first("more") || data.metrics[1] || data.metrics[0] || {}).key;
  const starting = data.runs.findIndex((run) => !run.plain);
  state.run = Math.max(0, starting);
  state.beside = data.runs[state.run].reference;

  function choose(run, move) {
    state.run = run;
    state.beside = data.runs[run].reference;
    if (data.runs[run].model !== state.model) {
      state.model = data.runs[run].model;
      at("model").value = state.model;
      chart();
    }
    for (const point of document.querySelectorAll("#chart .point"))
      point.setAttribute("aria-pressed", String(Number(point.dataset.run) === run));
    for (const row of document.querySelectorAll("#results tbody tr"))
      row.setAttribute("aria-current", String(Number(row.dataset.run) === run));
    gallery();
    if (move) at("pictures-head").scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  // ---- the frontier --------------------------------------------------------------------------

  function marker(shape, x, y, r) {
    const paths = {
      square: `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
      up: `M0 ${-1.2 * r}L${1.15 * r} ${r}H${-1.15 * r}z`,
      down: `M0 ${1.2 * r}L${1.15 * r} ${-r}H${-1.15 * r}z`,
      diamond: `M0 ${-1.3 * r}L${1.3 * r} 0L0 ${1.3 * r}L${-1.3 * r} 0z`,
      cross: `M${-r} ${-r}L${r} ${r}M${-r} ${r}L${r} ${-r}`,
      plus: `M0 ${-1.3 * r}V${1.3 * r}M${-1.3 * r} 0H${1.3 * r}`,
      bar: `M${-0.55 * r} ${-1.3 * r}h${1.1 * r}v${2.6 * r}h${-1.1 * r}z`,
      circle: `M${r} 0A${r} ${r} 0 1 1 ${-r} 0A${r} ${r} 0 1 1 ${r} 0z`,
    };
    return draw("path", {
      d: paths[shape],
      transform: `translate(${x} ${y})`,
      fill: "var(--colour)",
      stroke: "var(--colour)",
      "stroke-width": shape === "cross" || shape === "plus" ? 3 : 1,
    });
  }
  const shapeOf = (family) => SHAPES[family % SHAPES.length];
  const isPlain = (family) => data.runs.some((run) => run.family === family && run.plain);
  const look = (family) =>
    isPlain(family)
      ? { class: "plain", style: "" }
      : { class: "", style: `--colour:${colourOf(family)}` };

  function scale(cells, from, to) {
    const ends = cells.flatMap((cell) => [cell[0], cell[1], cell[2]]).filter((v) => v !== null);
    let low = Math.min(...ends),
      high = Math.max(...ends);
    if (low === high) {
      low -= Math.abs(low) * 0.1 || 0.5;
      high += Math.abs(high) * 0.1 || 0.5;
    }
    const room = (high - low) * 0.06;
    low -= room;
    high += room;
    const rough = (high - low) / 6,
      power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((k) => k * power >= rough);
    const ticks = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) ticks.push(k * step);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const place = (value) => from + ((value - low) / (high - low)) * (to - from);
    return {
      place,
      ticks,
      text: (value) =>
        Math.abs(value) >= 1e5 ? value.toPrecision(3) : value.toFixed(Math.min(digits, 8)),
    };
  }

  function chart() {
    if (!data.metrics.length) return;
    const box = at("chart"),
      width = Math.max(300, box.clientWidth || 1000);
    const height = width < 560 ? 340 : 440;
    const { x: keyX, y: keyY } = state;
    const runs = data.runs
      .map((run, number) => ({ run, number }))
      .filter(
        ({ run }) =>
          run.model === state.model &&
          run.metrics[keyX] &&
          run.metrics[keyY] &&
          run.metrics[keyX][0] !== null &&
          run.metrics[keyY][0] !== null &&
          !state.hidden.has(run.family),
      );
    const svg = draw("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "group",
      "aria-label": `${metricOf(keyY).title} against ${metricOf(keyX).title}, ${runs.length} runs`,
    });
    if (!runs.length) {
      svg.append(
        draw(
          "text",
          { x: width / 2, y: height / 2, "text-anchor": "middle" },
          "No run has both metrics.",
        ),
      );
      box.replaceChildren(svg);
      legend();
      return;
    }
    const inner = { left: 62, right: width - 14, top: 14, bottom: height - 46 };
    const x = scale(
      runs.map(({ run }) => run.metrics[keyX]),
      inner.left,
      inner.right,
    );
    const y = scale(
      runs.map(({ run }) => run.metrics[keyY]),
      inner.bottom,
      inner.top,
    );
    frame(svg, x, y, inner, height);
    for (const { run } of runs.filter(({ run }) => run.plain)) level(svg, run, y, inner);
    for (const family of new Set(runs.map(({ run }) => run.family))) {
      const members = runs
        .filter(({ run }) => run.family === family)
        .sort(
          (a, b) =>
            (a.run.delta ?? 0) - (b.run.delta ?? 0) || (a.run.seed ?? 0) - (b.run.seed ?? 0),
        );
      const places = members.map(({ run }) => [
        x.place(run.metrics[keyX][0]),
        y.place(run.metrics[keyY][0]),
      ]);
      const group = draw("g", look(family));
      if (members.length > 1 && members.some(({ run }) => run.delta !== null))
        group.append(
          draw("polyline", {
            points: places.map((p) => p.join(",")).join(" "),
            fill: "none",
            stroke: "var(--colour)",
            "stroke-width": 1.5,
            opacity: 0.7,
          }),
        );
      members.forEach((member, i) => group.append(...bars(member.run, x, y)));
      members.forEach((member, i) => group.append(point(member, places[i])));
      svg.append(group);
    }
    box.replaceChildren(svg);
    legend();
  }

  function frame(svg, x, y, inner, height) {
    for (const tick of x.ticks) {
      const px = x.place(tick);
      svg.append(
        draw("line", { class: "grid", x1: px, x2: px, y1: inner.top, y2: inner.bottom }),
        draw("text", { x: px, y: inner.bottom + 17, "text-anchor": "middle" }, x.text(tick)),
      );
    }
    for (const tick of y.ticks) {
      const py = y.place(tick);
      svg.append(
        draw("line", { class: "grid", x1: inner.left, x2: inner.right, y1: py, y2: py }),
        draw("text", { x: inner.left - 7, y: py + 4, "text-anchor": "end" }, y.text(tick)),
      );
    }
    svg.append(
      draw("path", {
        class: "axis",
        fill: "none",
        d: `M${inner.left} ${inner.top}V${inner.bottom}H${inner.right}`,
      }),
      draw(
        "text",
        {
          class: "name",
          x: (inner.left + inner.right) / 2,
          y: height - 8,
          "text-anchor": "middle",
        },
        named(state.x),
      ),
      draw(
        "text",
        {
          class: "name",
          transform: `translate(15 ${(inner.top + inner.bottom) / 2}) rotate(-90)`,
          "text-anchor": "middle",
        },
        named(state.y),
      ),
    );
  }
  const named = (key) => metricOf(key).heading;

  function level(svg, run, y, inner) {
    const [value, low, high] = run.metrics[state.y];
    if (low !== null && high !== null)
      svg.append(
        draw("rect", {
          x: inner.left,
          width: inner.right - inner.left,
          y: y.place(Math.max(low, high)),
          height: Math.abs(y.place(low) - y.place(high)),
          fill: "var(--ink)",
          opacity: 0.06,
        }),
      );
    svg.append(
      draw("line", {
        x1: inner.left,
        x2: inner.right,
        y1: y.place(value),
        y2: y.place(value),
        stroke: "var(--ink)",
        "stroke-dasharray": "5 4",
        opacity: 0.6,
      }),
    );
  }

  function bars(run, x, y) {
    const [vx, lx, hx] = run.metrics[state.x],
      [vy, ly, hy] = run.metrics[state.y];
    const line = (x1, y1, x2, y2) =>
      draw("line", { x1, y1, x2, y2, stroke: "var(--colour)", opacity: 0.45 });
    const found = [];
    if (lx !== null && hx !== null)
      found.push(line(x.place(lx), y.place(vy), x.place(hx), y.place(vy)));
    if (ly !== null && hy !== null)
      found.push(line(x.place(vx), y.place(ly), x.place(vx), y.place(hy)));
    return found;
  }

  function point({ run, number }, [px, py]) {
    const cells = [state.x, state.y].map(
      (key) => `${metricOf(key).title} ${said(run.metrics[key])}`,
    );
    const node = draw(
      "g",
      {
        class: "point",
        tabindex: 0,
        role: "button",
        "data-run": number,
        "data-x": px,
        "aria-pressed": String(number === state.run),
        "aria-label": `${title(run)}: ${cells.join(", ")}`,
      },
      draw("circle", { class: "ring", cx: px, cy: py, r: 11 }),
      draw("circle", { cx: px, cy: py, r: 15, fill: "transparent" }),
      marker(run.plain ? "circle" : shapeOf(run.family), px, py, 5.2),
      run.delta === null
        ? null
        : draw("text", { x: px + 8, y: py - 8, "font-size": 11 }, String(run.delta)),
    );
    const show = () => {
      const where = node.getBoundingClientRect();
      tip(where.left + where.width / 2, where.top, title(run), [...cells, `${run.images} images`]);
    };
    node.addEventListener("pointerenter", show);
    node.addEventListener("focus", show);
    for (const gone of ["pointerleave", "blur"])
      node.addEventListener(gone, () => {
        at("tip").hidden = true;
      });
    node.addEventListener("click", () => choose(number, true));
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        choose(number, true);
      }
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const all = [...document.querySelectorAll("#chart .point")].sort(
        (a, b) => a.dataset.x - b.dataset.x,
      );
      all[(all.indexOf(node) + step + all.length) % all.length].focus();
    });
    return node;
  }
  const said = (cell) => cell[4] + (cell[5] ? ` (${cell[5]})` : "");

  function tip(x, y, head, lines) {
    const box = at("tip");
    box.replaceChildren(make("b", {}, head), ...lines.map((line) => make("div", {}, line)));
    box.hidden = false;
    const size = box.getBoundingClientRect();
    box.style.left = `${Math.min(Math.max(6, x - size.width / 2), innerWidth - size.width - 6)}px`;
    box.style.top = `${y - size.height - 8 > 4 ? y - size.height - 8 : y + 34}px`;
  }

  function legend() {
    const here = [
      ...new Set(data.runs.filter((run) => run.model === state.model).map((run) => run.family)),
    ];
    at("legend").replaceChildren(
      ...here.map((family) => {
        const swatch = draw(
          "svg",
          { width: 18, height: 18, "aria-hidden": "true", ...look(family) },
          marker(isPlain(family) ? "circle" : shapeOf(family), 9, 9, 5),
        );
        return make(
          "button",
          {
            type: "button",
            "aria-pressed": String(!state.hidden.has(family)),
            "data-family": family,
            onclick: () => {
              if (!state.hidden.delete(family)) state.hidden.add(family);
              chart();
              document.querySelector(`#legend [data-family="${family}"]`).focus();
            },
          },
          swatch,
          data.families[family],
        );
      }),
    );
  }

  // ---- pictures ------------------------------------------------------------------------------

  function image(place, alt) {
    if (place === null || place === undefined) return make("div", { class: "none" }, "no picture");
    const shown = make("img", { src: data.pictures[place], alt, decoding: "async" });
    shown.addEventListener("load", () => shown.classList.toggle("small", shown.naturalWidth < 200));
    return shown;
  }
  const entry = (run, prompt) =>
    run === null
      ? null
      : data.runs[run].prompts.find((one) => one.id === prompt.id && one.text === prompt.text) ||
        null;

  function gallery() {
    const run = data.runs[state.run],
      other = state.beside === null ? null : data.runs[state.beside];
    at("run").value = state.run;
    at("beside").value = state.beside === null ? "" : state.beside;
    at("pictures-head").textContent = `Pictures of ${title(run)}`;
    const notes = [];
    if (other) {
      const seed = other.seed === run.seed ? " and seed" : "";
      notes.push(`Left ${title(other)}, right ${title(run)}, on the same prompts${seed}.`);
    } else if (!run.plain)
      notes.push(
        "No run here is plain autoregression with the same sampling and seed.",
      );
    notes.push(
      run.prompts.some((one) => one.replay)
        ? "Open a picture to see its tokens and a replay of its decode."
        : "This run kept no replays: run it again in another directory with replays=24.",
    );
    at("pictures-note").textContent = notes.join(" ");
    at("pictures").replaceChildren(
      ...run.prompts.map((prompt) => {
        const beside = entry(state.beside, prompt);
        const button = make(
          "button",
          {
            type: "button",
            class: "shot",
            "aria-label": `Open: ${prompt.text}`,
            onclick: () => viewer.open(state.run, prompt, state.beside),
          },
          other ? image(beside && beside.picture, `${title(other)}: ${prompt.text}`) : null,
          image(prompt.picture, `${title(run)}: ${prompt.text}`),
        );
        const length =
          prompt.length === null
            ? null
            : make("span", {}, `${prompt.length.toFixed(2)} tokens per round`);
        return make(
          "figure",
          {},
          button,
          other
            ? make(
                "div",
                { class: "who", "aria-hidden": "true" },
                make("span", {}, other.name),
                make("span", {}, run.name),
              )
            : null,
          make("figcaption", {}, prompt.text, length),
        );
      }),
    );
  }

  // ---- one picture: its tokens and its replay ------------------------------------------------

  class Replay {
    constructor(packed) {
      for (const name of ["rows", "columns", "blank"]) this[name] = packed[name];
      for (const name of [
        "emitted",
        "origin",
        "nodes",
        "order",
        "tokens",
        "logprob",
        "drafted",
        "parents",
        "fate",
      ])
        this[name] = packed[name] ? unpack(packed[name]) : null;
      this.length = this.origin.length;
      this.starts = [0];
      for (const count of this.emitted)
        this.starts.push(this.starts[this.starts.length - 1] + count);
      this.rounds = this.emitted.length;
      this.nodeStarts = [0];
      for (const count of this.nodes)
        this.nodeStarts.push(this.nodeStarts[this.nodeStarts.length - 1] + count);
      this.roundOf = [];
      this.depth = [];
      this.emitted.forEach((count, round) => {
        for (let place = 1; place <= count; place++) {
          this.roundOf.push(round);
          this.depth.push(this.origin[this.depth.length] === ACCEPTED ? place : 0);
        }
      });
    }
    cell(token) {
      const place = this.order ? this.order[token] : token;
      const row = Math.floor(place / this.columns),
        column = place % this.columns;
      return column < this.columns - this.blank ? { row, column } : null;
    }
    tokenAt(row, column) {
      const place = row * this.columns + column;
      return this.order ? this.order.indexOf(place) : place;
    }
    known(round) {
      return this.starts[Math.min(round, this.rounds)];
    }
    /** What was drafted in a round, 1 to `rounds`: depth, token and fate of every node. */
    drafts(round) {
      if (!this.fate) return [];
      const from = this.nodeStarts[round - 1],
        count = this.nodes[round - 1],
        found = [];
      for (let node = 0; node < count; node++) {
        const parent = this.parents[(from + node) % this.parents.length] - 1;
        found.push({
          depth: parent < 0 ? 1 : found[parent].depth + 1,
          token: this.drafted[from + node],
          fate: this.fate[from + node],
        });
      }
      return found;
    }
  }

  const unpacked = new Map();
  function replayOf(prompt) {
    if (!prompt || !prompt.replay) return null;
    if (!unpacked.has(prompt)) unpacked.set(prompt, new Replay(prompt.replay));
    return unpacked.get(prompt);
  }

  function ramp(share) {
    const where = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1),
      low = Math.floor(where);
    const parts = [RAMP[low], RAMP[Math.min(low + 1, RAMP.length - 1)]].map((colour) =>
      [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16)),
    );
    const mixed = parts[0].map((value, i) => value + (parts[1][i] - value) * (where - low));
    return `rgb(${mixed.map(Math.round).join(",")})`;
  }

  /** Fill a cell by how its token came about; lines and dots say it without colour. */
  function stamp(pen, origin, x, y, size) {
    pen.globalAlpha = 0.62;
    pen.fillStyle = ORIGINS[origin][1];
    pen.fillRect(x, y, size, size);
    pen.globalAlpha = 0.9;
    pen.strokeStyle = pen.fillStyle = "#fff";
    pen.lineWidth = Math.max(1, size / 14);
    pen.beginPath();
    if (origin === RESAMPLED) {
      pen.moveTo(x + size * 0.25, y + size * 0.75);
      pen.lineTo(x + size * 0.75, y + size * 0.25);
      pen.stroke();
    } else if (origin === BONUS) {
      pen.arc(x + size / 2, y + size / 2, size * 0.12, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  /** One side of the viewer: a canvas with a picture, its tokens and a cursor. */
  class Pane {
    constructor(run, prompt) {
      this.run = run;
      this.prompt = prompt;
      this.replay = replayOf(prompt);
      this.cursor = null;
      this.canvas = make("canvas", { tabindex: 0, role: "img" });
      this.caption = make("figcaption", {});
      this.figure = make("figure", {}, this.canvas, this.caption);
      this.picture = new Image();
      this.ready = new Promise((done) => {
        this.picture.onload = this.picture.onerror = done;
        if (prompt && prompt.picture !== null) this.picture.src = data.pictures[prompt.picture];
        else done();
      });
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerdown", (event) => this.point(event));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
    }
    size() {
      const replay = this.replay,
        columns = replay ? replay.columns - replay.blank : 1,
        rows = replay ? replay.rows : 1;
      const wide = this.picture.naturalWidth || columns,
        high = this.picture.naturalHeight || rows;
      const grid = Math.max(1, Math.round(640 / Math.max(columns, rows)));
      return replay
        ? { cell: grid, width: columns * grid, height: rows * grid }
        : {
            cell: 0,
            width: Math.round((640 * wide) / Math.max(wide, high)),
            height: Math.round((640 * high) / Math.max(wide, high)),
          };
    }
    paint(round, mode) {
      const { cell, width, height } = this.size(),
        { canvas, replay } = this;
      canvas.width = width;
      canvas.height = height;
      const pen = canvas.getContext("2d");
      pen.imageSmoothingEnabled = this.picture.naturalWidth > 200;
      if (this.picture.naturalWidth) pen.drawImage(this.picture, 0, 0, width, height);
      const who = title(data.runs[this.run]);
      if (!replay) {
        this.say(`${who}: no replay kept`, "finished");
        return;
      }
      const known = replay.known(round);
      for (let token = 0; token < replay.length; token++) this.token(pen, token, known, mode, cell);
      if (round >= 1 && round <= replay.rounds && known < replay.length)
        this.marks(pen, round, cell);
      if (this.cursor) {
        pen.strokeStyle = "#000";
        pen.lineWidth = 4;
        pen.strokeRect(
          this.cursor.column * cell + 1,
          this.cursor.row * cell + 1,
          cell - 2,
          cell - 2,
        );
        pen.strokeStyle = "#fff";
        pen.lineWidth = 2;
        pen.strokeRect(
          this.cursor.column * cell + 1,
          this.cursor.row * cell + 1,
          cell - 2,
          cell - 2,
        );
      }
      const done = round >= replay.rounds;
      this.say(
        done
          ? `${who}: finished, ${replay.length} tokens in ${replay.rounds} rounds`
          : `${who}: ${known} of ${replay.length} tokens after ${round} rounds`,
        done ? "finished" : `${known}/${replay.length}`,
      );
    }
    say(text, stage) {
      this.caption.textContent = text;
      this.canvas.setAttribute("aria-label", `${text}. ${this.prompt ? this.prompt.text : ""}`);
      this.canvas.dataset.stage = stage;
    }
    token(pen, token, known, mode, size) {
      const cell = this.replay.cell(token);
      if (!cell) return;
      const x = cell.column * size,
        y = cell.row * size;
      if (token >= known) {
        pen.fillStyle = "#7773";
        pen.clearRect(x, y, size, size);
        pen.fillRect(x, y, size, size);
      } else if (mode === "origin") {
        stamp(pen, this.replay.origin[token], x, y, size);
      } else if (mode === "depth" || mode === "logprob") {
        const share =
          mode === "depth"
            ? this.replay.depth[token] / viewer.deepest
            : 1 - this.replay.logprob[token] / viewer.lowest;
        pen.globalAlpha = 0.85;
        pen.fillStyle = ramp(share);
        pen.fillRect(x, y, size, size);
        pen.globalAlpha = 1;
      }
    }
    /** The round's tokens framed; a cross: drafts were rejected, a dashed frame: none was tested. */
    marks(pen, round, size) {
      const { replay } = this,
        start = replay.starts[round - 1],
        end = replay.starts[round];
      const frame = (token, colour, dash) => {
        const cell = token < replay.length ? replay.cell(token) : null;
        if (!cell) return null;
        const x = cell.column * size,
          y = cell.row * size;
        pen.strokeStyle = colour;
        pen.lineWidth = Math.max(2, size / 9);
        pen.setLineDash(dash ? [size / 5, size / 7] : []);
        pen.strokeRect(
          x + pen.lineWidth / 2,
          y + pen.lineWidth / 2,
          size - pen.lineWidth,
          size - pen.lineWidth,
        );
        pen.setLineDash([]);
        return { x, y };
      };
      const fates = new Map();
      for (const { depth, fate } of replay.drafts(round))
        fates.set(depth, Math.max(fate, fates.get(depth) || 0));
      const furthest = fates.size ? largest([...fates.keys()]) : replay.nodes[round - 1];
      for (let token = end; token < start + furthest; token++) frame(token, "#888", true);
      for (let token = start; token < end; token++)
        frame(token, ORIGINS[replay.origin[token]][1], false);
      for (const [depth, fate] of fates) {
        if (fate !== 1) continue;
        const place = frame(start + depth - 1, ORIGINS[RESAMPLED][1], false);
        if (!place) continue;
        for (const [colour, width] of [
          ["#fff", 5],
          ["#000", 2],
        ]) {
          pen.strokeStyle = colour;
          pen.lineWidth = Math.max(1, (width * size) / 40);
          pen.beginPath();
          for (const [a, b] of [
            [0.25, 0.75],
            [0.75, 0.25],
          ]) {
            pen.moveTo(place.x + size * 0.25, place.y + size * a);
            pen.lineTo(place.x + size * 0.75, place.y + size * b);
          }
          pen.stroke();
        }
      }
    }
    point(event) {
      if (!this.replay) return;
      const box = this.canvas.getBoundingClientRect(),
        { cell, width, height } = this.size();
      const column = Math.floor(((event.clientX - box.left) / box.width) * (width / cell));
      const row = Math.floor(((event.clientY - box.top) / box.height) * (height / cell));
      this.go(row, column);
    }
    key(event) {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[
        event.key
      ];
      if (!step || !this.replay) return;
      event.preventDefault();
      const from = this.cursor || { row: -step[0], column: -step[1] };
      this.go(from.row + step[0], from.column + step[1]);
    }
    go(row, column) {
      const { replay } = this;
      this.cursor = {
        row: Math.min(Math.max(row, 0), replay.rows - 1),
        column: Math.min(Math.max(column, 0), replay.columns - replay.blank - 1),
      };
      viewer.tell(this);
    }
    about() {
      const { replay, cursor } = this,
        token = replay.tokenAt(cursor.row, cursor.column);
      const parts = [
        `${title(data.runs[this.run])}, row ${cursor.row + 1}, column ${cursor.column + 1}`,
      ];
      if (replay.tokens) parts.push(`token ${replay.tokens[token]}`);
      parts.push(
        replay.origin[token] === ACCEPTED
          ? `accepted draft at depth ${replay.depth[token]}`
          : ORIGINS[replay.origin[token]][0].replace(":", ","),
      );
      if (replay.logprob) parts.push(`log-probability ${logText(replay.logprob[token])}`);
      parts.push(`round ${replay.roundOf[token] + 1}`);
      return parts.join(" · ");
    }
  }
  const logText = (value) =>
    value >= 65535 ? "below −65.5" : value === 0 ? "0.000" : `−${(value / 1000).toFixed(3)}`;

  const MODES = [
    ["picture", "picture"],
    ["origin", "how it came about"],
    ["depth", "depth of the draft"],
    ["logprob", "log-probability"],
  ];
  const viewer = {
    panes: [],
    mode: "picture",
    round: 0,
    rounds: 0,
    deepest: 1,
    lowest: 1,
    timer: null,

    async open(run, prompt, beside) {
      const other = entry(beside, prompt);
      this.panes = [...(other ? [new Pane(beside, other)] : []), new Pane(run, prompt)];
      this.main = this.panes[this.panes.length - 1];
      const replays = this.panes.map((pane) => pane.replay).filter(Boolean);
      this.rounds = largest(replays.map((replay) => replay.rounds));
      this.deepest = Math.max(1, ...replays.map((replay) => largest(replay.depth)));
      this.lowest = Math.max(
        1,
        ...replays.map((replay) =>
          replay.logprob
            ? [...replay.logprob].sort((a, b) => a - b)[Math.floor(0.98 * (replay.length - 1))]
            : 0,
        ),
      );
      at("viewer-title").textContent = prompt.text;
      at("stage").replaceChildren(...this.panes.map((pane) => pane.figure));
      at("player").hidden = at("modes").hidden = at("key").hidden = !replays.length;
      at("token").textContent = replays.length
        ? "Point at a cell, or focus the picture and use the arrow keys."
        : "";
      this.choices(replays);
      const slider = at("round");
      slider.max = this.rounds;
      at("viewer").showModal();
      await Promise.all(this.panes.map((pane) => pane.ready));
      this.show(this.rounds);
    },
    choices(replays) {
      const known = MODES.filter(
        ([key]) => key !== "logprob" || replays.some((replay) => replay.logprob),
      );
      if (!known.some(([key]) => key === this.mode)) this.mode = "picture";
      at("modes").replaceChildren(
        ...known.map(([key, text]) => {
          const box = make("input", {
            type: "radio",
            name: "mode",
            value: key,
            onchange: () => {
              this.mode = key;
              this.show(this.round);
            },
          });
          box.checked = key === this.mode;
          return make("label", {}, box, text);
        }),
      );
    },
    show(round) {
      this.round = Math.min(Math.max(round, 0), this.rounds);
      const slider = at("round");
      slider.value = this.round;
      slider.setAttribute("aria-valuetext", `round ${this.round} of ${this.rounds}`);
      for (const pane of this.panes)
        pane.paint(
          this.round,
          this.mode === "logprob" && pane.replay && !pane.replay.logprob ? "picture" : this.mode,
        );
      this.key();
      this.describe();
    },
    key() {
      const parts = [];
      if (this.mode === "origin")
        ORIGINS.forEach(([text], origin) => {
          const swatch = make("canvas", { width: 18, height: 18, "aria-hidden": "true" });
          stamp(swatch.getContext("2d"), origin, 0, 0, 18);
          parts.unshift(make("span", {}, swatch, text));
        });
      if (this.mode === "depth" || this.mode === "logprob") {
        const ends =
          this.mode === "depth"
            ? ["0, drawn", `depth ${this.deepest}`]
            : [`${logText(this.lowest)} or less`, "0"];
        parts.push(
          make(
            "span",
            {},
            ends[0],
            make("span", {
              class: "ramp",
              style: `background:linear-gradient(90deg,${RAMP.join(",")})`,
            }),
            ends[1],
          ),
        );
      }
      at("key").replaceChildren(...parts);
    },
    describe() {
      const { replay } = this.main,
        round = this.round;
      const text = at("round-text");
      at("drafted").replaceChildren();
      if (!replay) return;
      const tell = (words) => (text.textContent = `Round ${round} of ${this.rounds}: ${words}.`);
      if (round === 0) return tell("no tokens yet");
      if (round > replay.rounds)
        return tell(`${data.runs[this.main.run].name} finished in round ${replay.rounds}`);
      const end = replay.starts[round],
        start = replay.starts[round - 1],
        last = replay.origin[end - 1];
      const accepted = replay.origin
        .slice(start, end)
        .filter((origin) => origin === ACCEPTED).length;
      const drafts = replay.drafts(round),
        count = (fate) => drafts.filter((one) => one.fate === fate).length;
      const parts = [`${replay.nodes[round - 1]} drafted`, `${accepted} accepted`];
      if (drafts.length) parts.push(`${count(1)} rejected`, `${count(0)} not tested`);
      const drawn = replay.tokens ? `token ${replay.tokens[end - 1]}` : "a token";
      const more =
        last === ACCEPTED
          ? "the image ended inside the draft"
          : `then ${drawn} drawn from the ${last === RESAMPLED ? "residual" : "target"}`;
      if (replay.nodes[round - 1]) tell(`${parts.join(", ")}; ${more}`);
      else tell(`nothing drafted; ${drawn} drawn from the target`);
      this.listDrafts(drafts);
    },
    listDrafts(drafts) {
      const list = at("drafted");
      const depths = largest(drafts.map((one) => one.depth));
      for (let depth = 1; depth <= depths; depth++) {
        const level = drafts.filter((one) => one.depth === depth).sort((a, b) => b.fate - a.fate);
        list.append(
          make(
            "li",
            {},
            make("b", {}, `depth ${depth}`),
            ...level
              .slice(0, 4)
              .map(({ token, fate }) =>
                make(
                  "span",
                  { class: ["untested", "rejected", "kept"][fate] },
                  `${["–", "✗", "✓"][fate]} ${token}`,
                ),
              ),
            level.length > 4 ? make("b", {}, `and ${level.length - 4} more`) : null,
          ),
        );
      }
    },
    tell(pane) {
      for (const one of this.panes) if (one !== pane) one.cursor = null;
      this.show(this.round);
      at("token").textContent = pane.about();
    },
    play() {
      if (this.timer) {
        this.stop();
        return;
      }
      if (this.round >= this.rounds) this.show(0);
      at("play").textContent = "Pause";
      this.timer = setInterval(() => {
        this.show(this.round + 1);
        if (this.round >= this.rounds) this.stop();
      }, 140);
    },
    stop() {
      clearInterval(this.timer);
      this.timer = null;
      at("play").textContent = "Play";
    },
  };

  // ---- the table -----------------------------------------------------------------------------

  function results() {
    const kind = state.kind;
    const shown = data.metrics.filter(
      (metric) =>
        (kind === "differences" || state.all || metric.main) &&
        data.runs.some((run) => run[kind][metric.key]),
    );
    const columns = [
      { key: "run", text: "run", of: (run) => title(run) },
      { key: "images", text: "images", of: (run) => run.images },
      ...shown.map((metric) => ({
        key: metric.key,
        text: kind === "metrics" ? metric.heading : metric.title,
        unit: metric.unit,
        of: (run) => (run[kind][metric.key] ? run[kind][metric.key][0] : null),
        metric,
      })),
    ];
    const order = data.runs.map((run, number) => number);
    const by = columns.find((column) => column.key === state.sort);
    if (by)
      order.sort((a, b) => {
        const [left, right] = [by.of(data.runs[a]), by.of(data.runs[b])];
        if (left === null || right === null) return (left === null) - (right === null) || a - b;
        const sign =
          typeof left === "string"
            ? left.localeCompare(right, undefined, { numeric: true })
            : left - right;
        return (state.down ? -sign : sign) || a - b;
      });
    const head = columns.map((column) => {
      const chosen = state.sort === column.key,
        arrow = chosen ? (state.down ? " ▼" : " ▲") : "";
      return make(
        "th",
        {
          scope: "col",
          title: column.unit || null,
          "aria-sort": chosen ? (state.down ? "descending" : "ascending") : "none",
        },
        make(
          "button",
          {
            type: "button",
            "data-key": column.key,
            onclick: () => {
              state.down = chosen && !state.down;
              state.sort = column.key;
              results();
              document.querySelector(`#results [data-key="${column.key}"]`).focus();
            },
          },
          column.text + arrow,
        ),
      );
    });
    const lines = order.map((number) => {
      const run = data.runs[number];
      const cells = columns.slice(2).map(({ metric }) => value(run[kind][metric.key], kind));
      return make(
        "tr",
        { "data-run": number, "aria-current": String(number === state.run) },
        make(
          "th",
          { scope: "row" },
          make(
            "button",
            { type: "button", title: run.directory, onclick: () => choose(number, true) },
            title(run),
          ),
        ),
        make("td", {}, String(run.images)),
        ...cells,
      );
    });
    at("results").replaceChildren(
      make("thead", {}, make("tr", {}, ...head)),
      make("tbody", {}, ...lines),
    );
    at("table-note").textContent =
      kind === "metrics"
        ? "Each value has its 95% bootstrap interval over prompts. Click a column's head to sort."
        : `Difference from ${data.against}, prompt by prompt on the same seeds; ` +
          "bold if the interval excludes 0, which one in twenty does by chance.";
  }
  function value(cell, kind) {
    if (!cell) return make("td", {}, "–");
    const clear = kind === "differences" && cell[1] !== null && cell[1] * cell[2] > 0;
    return make("td", { class: clear ? "clear" : null }, cell[4], make("small", {}, cell[5]));
  }

  function papers() {
    at("papers").hidden = !data.papers.length;
    for (const paper of data.papers) {
      const two = paper.columns.flatMap(() => [
        make("th", { scope: "col" }, "paper"),
        ...paper.models.map((model) => make("th", { scope: "col" }, model)),
      ]);
      at("papers").append(
        make("h3", {}, paper.title),
        make(
          "div",
          { class: "wide", role: "region", "aria-label": paper.title, tabindex: 0 },
          make(
            "table",
            {},
            make(
              "thead",
              {},
              make(
                "tr",
                {},
                make("th", { rowspan: 2, scope: "col" }, "run"),
                ...paper.columns.map((column) =>
                  make("th", { colspan: 1 + paper.models.length, scope: "colgroup" }, column),
                ),
              ),
              make("tr", {}, ...two),
            ),
            make(
              "tbody",
              {},
              ...paper.lines.map(([name, pairs]) =>
                make(
                  "tr",
                  {},
                  make("th", { scope: "row" }, name),
                  ...pairs.flat().map((cell) => make("td", {}, cell)),
                ),
              ),
            ),
          ),
        ),
        ...paper.notes.map((note) => make("p", { class: "hint" }, note)),
      );
    }
  }

  function study() {
    at("study").hidden = !data.study.length;
    for (const part of data.study) {
      at("study").append(
        make("h3", {}, part.title),
        make("p", { class: "hint" }, part.text),
        make(
          "div",
          { class: "wide", role: "region", "aria-label": part.title, tabindex: 0 },
          make(
            "table",
            {},
            make(
              "thead",
              {},
              make("tr", {}, ...part.head.map((name) => make("th", { scope: "col" }, name))),
            ),
            make(
              "tbody",
              {},
              ...part.lines.map(([name, ...line]) =>
                make(
                  "tr",
                  {},
                  make("th", { scope: "row" }, name),
                  ...line.map((cell) => make("td", {}, cell)),
                ),
              ),
            ),
          ),
        ),
      );
    }
  }

  // ---- start ---------------------------------------------------------------------------------

  function theme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    at("theme").textContent = dark ? "Light" : "Dark";
  }
  const fill = (id, pairs, chosen) => {
    at(id).replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
    at(id).value = chosen;
  };
  function start() {
    theme(matchMedia("(prefers-color-scheme: dark)").matches);
    at("title").textContent = data.title;
    at("cautions").append(...data.cautions.map((text) => make("li", {}, text)));
    const models = [...new Set(data.runs.map((run) => run.model))];
    fill(
      "model",
      models.map((model) => [model, model]),
      state.model,
    );
    at("model-label").hidden = models.length < 2;
    const axes = data.metrics.map((metric) => [metric.key, metric.heading]);
    fill("axis-x", axes, state.x);
    fill("axis-y", axes, state.y);
    const runs = data.runs.map((run, number) => [number, title(run)]);
    fill("run", runs, state.run);
    fill("beside", [["", "nothing"], ...runs], state.beside ?? "");
    at("kind-label").hidden = !data.runs.some((run) => Object.keys(run.differences).length);
  }
  function listen() {
    const on = (id, event, does) => at(id).addEventListener(event, does);
    on("theme", "click", () => theme(document.documentElement.dataset.theme !== "dark"));
    on("model", "change", (event) => {
      state.model = event.target.value;
      chart();
    });
    on("axis-x", "change", (event) => {
      state.x = event.target.value;
      chart();
    });
    on("axis-y", "change", (event) => {
      state.y = event.target.value;
      chart();
    });
    on("run", "change", (event) => choose(Number(event.target.value), false));
    on("beside", "change", (event) => {
      state.beside = event.target.value === "" ? null : Number(event.target.value);
      gallery();
    });
    on("kind", "change", (event) => {
      state.kind = event.target.value;
      results();
    });
    on("all", "change", (event) => {
      state.all = event.target.checked;
      results();
    });
    on("close", "click", () => at("viewer").close());
    on("viewer", "close", () => viewer.stop());
    on("viewer", "click", (event) => {
      if (event.target === at("viewer")) at("viewer").close();
    });
    on("play", "click", () => viewer.play());
    on("back", "click", () => {
      viewer.stop();
      viewer.show(viewer.round - 1);
    });
    on("forward", "click", () => {
      viewer.stop();
      viewer.show(viewer.round + 1);
    });
    on("round", "input", (event) => {
      viewer.stop();
      viewer.show(Number(event.target.value));
    });
    let wide = 0;
    new ResizeObserver(() => {
      if (Math.abs(at("chart").clientWidth - wide) > 1) {
        wide = at("chart").clientWidth;
        chart();
      }
    }).observe(at("chart"));
  }
  start();
  listen();
  chart();
  gallery();
  results();
  study();
  papers();
  document.documentElement.dataset.ready = "true";
})();
