"use strict";
// The page's script: the chart, the gallery, and one picture's tokens, replayed as they were decoded,
// in seconds or in rounds.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const [BONUS, RESAMPLED, ACCEPTED] = [0, 1, 2]; // how a token came about: its origin
  const ORIGINS = [
    ["bonus: drawn from the target", "#56b4e9"],
    ["resampled: drawn from a residual", "#d55e00"],
    ["accepted draft", "#009e73"],
  ];
  const FATES = ["untested", "rejected", "kept"];
  const RAMP = ["#00204c", "#ffea46"];
  const PLAYED = 10; // seconds that a replay takes, however long the decode took
  const TICK = 40; // milliseconds between its steps

  function make(tag, given = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }
  const unique = (values) => [...new Set(values)];
  const seconds = (value) => `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const models = unique(data.runs.map((run) => run.model));

  // ---- the chart: Vega's, with the runs' values of two metrics ---------------------------------

  const state = { run: Math.max(0, data.runs.findIndex((run) => !run.plain)), beside: null };
  const isDark = () => document.documentElement.dataset.theme === "dark";

  async function chart() {
    if (!data.chart) return;
    const [model, x, y] = ["model", "axis-x", "axis-y"].map((id) => at(id).value);
    const quoted = (key) =>
      JSON.stringify(data.metrics.find((one) => one.key === key).heading).slice(1, -1);
    const spec = JSON.parse(
      JSON.stringify(data.chart).replaceAll("@x", quoted(x)).replaceAll("@y", quoted(y)),
    );
    const rows = data.runs.map((run, number) => {
      const [left, right] = [run.metrics[x] || [null], run.metrics[y] || [null]];
      return {
        number, name: run.name, curve: run.curve, plain: run.plain, images: run.images,
        point: run.point, order: run.order,
        x: left[0], x_low: left[1] ?? left[0], x_high: left[2] ?? left[0],
        y: right[0], y_low: right[1] ?? right[0], y_high: right[2] ?? right[0],
      };
    });
    const placed = (row) => row.x !== null && row.y !== null;
    const among = rows.filter((row) => data.runs[row.number].model === model);
    spec.datasets = { runs: among.filter(placed) };
    const others = among.filter((row) => !placed(row) && !row.plain).map((row) => row.name);
    at("chart-note").textContent =
      others.length ? `Not plotted, because a value is not finite: ${others.join(", ")}.` : "";
    at("chart").dataset.points = spec.datasets.runs.length;
    const has = (plain) => spec.datasets.runs.some((row) => row.plain === plain);
    const isPlain = (layer) => layer.transform[0].filter === "datum.plain";
    spec.layer = spec.layer.filter((layer) => has(isPlain(layer))); // Vega warns of empty ones
    if (!has(false)) {
      at("chart").textContent = "No run except plain autoregression has both of these metrics.";
      return;
    }
    const columns = Math.max(1, Math.floor(at("chart").clientWidth / 190));
    const { view } = await vegaEmbed("#chart", spec, {
      actions: false,
      ast: true, // no eval: the page's policy forbids it
      renderer: "svg",
      theme: isDark() ? "dark" : undefined,
      config: {
        background: "transparent",
        autosize: { type: "fit", contains: "padding" },
        axis: { gridColor: "#8883", labelFontSize: 12, titleFontSize: 13 },
        legend: { orient: "bottom", columns, labelLimit: 300, labelFontSize: 12, symbolOpacity: 1 },
        text: { color: isDark() ? "#ececf0" : "#1c1c20" },
      },
    });
    view.addEventListener("click", (_, item) => {
      if (item && item.datum && item.datum.number !== undefined) choose(item.datum.number);
    });
  }

  // ---- the gallery -----------------------------------------------------------------------------

  function choose(run) {
    state.run = run;
    state.beside = data.runs[run].reference;
    gallery();
    at("pictures-head").scrollIntoView({ block: "nearest", behavior: "smooth" });
  }
  function image(prompt, alt) {
    if (!prompt || prompt.picture === null)
      return make("div", { class: "none" }, "no picture");
    const shown = make("img", { src: data.pictures[prompt.picture], alt, decoding: "async" });
    shown.classList.toggle("broken", prompt.broken);
    shown.addEventListener("load", () => shown.classList.toggle("small", shown.naturalWidth < 200));
    return shown;
  }
  function same(run, prompt) {
    if (run === null) return null;
    const known = data.runs[run].prompts;
    return known.find((one) => one.id === prompt.id && one.text === prompt.text) || null;
  }
  function gallery() {
    const run = data.runs[state.run];
    const other = state.beside === null ? null : data.runs[state.beside];
    at("run").value = state.run;
    at("beside").value = state.beside ?? "";
    const notes = [];
    if (other) notes.push(`Left ${other.name}, right ${run.name}, on the same prompts.`);
    else if (run.decoded && !run.plain && data.runs.length > 1)
      notes.push("No run here is plain autoregression with the same sampling and seed.");
    if (run.prompts.some((one) => one.replay))
      notes.push("Open a picture to see its tokens, and how they were decoded.");
    else if (run.decoded)
      notes.push("This run stored no replays. To get them, run it again in another directory.");
    at("pictures-note").textContent = notes.join(" ");
    at("pictures").replaceChildren(
      ...run.prompts.map((prompt) => {
        const beside = same(state.beside, prompt);
        const open = () => viewer.open(state.run, prompt, state.beside);
        const broken = prompt.broken ? ", broken" : "";
        const time = prompt.seconds === null ? "" : `${seconds(prompt.seconds)}, `;
        const rounds = prompt.length === null ? "" : `${prompt.length.toFixed(2)} tokens per round`;
        const tokens = `${time}${rounds}${broken}`;
        return make(
          "figure",
          {},
          make(
            "button",
            { type: "button", class: "shot", "aria-label": `Open: ${prompt.text}`, onclick: open },
            other && image(beside, `${other.name}: ${prompt.text}`),
            image(prompt, `${run.name}: ${prompt.text}`),
          ),
          make("figcaption", {}, prompt.text, make("span", {}, tokens)),
        );
      }),
    );
  }

  // ---- one picture: its tokens and its replay --------------------------------------------------

  class Replay {
    constructor(columns) {
      Object.assign(this, columns);
      const firsts = this.place.flatMap((place, token) => (place === 1 ? [token] : []));
      this.length = this.place.length;
      this.preview = this.length - this.rows * this.columns; // tokens before the image's
      this.rounds = firsts.length;
      this.starts = [...firsts, this.length]; // the first token of each round
      this.nodes = this.nodes || firsts.map((token) => this.proposed[token]);
      this.nodeStarts = [0];
      for (const count of this.nodes) this.nodeStarts.push(this.nodeStarts.at(-1) + count);
      this.depth = this.place.map((place, i) => (this.origin[i] === ACCEPTED ? place : 0));
    }
    cell(token) {
      const place = this.order ? this.order[token] : token - this.preview;
      if (place < 0) return null;
      const [row, column] = [Math.floor(place / this.columns), place % this.columns];
      return column < this.columns - this.blank ? { row, column } : null;
    }
    tokenAt({ row, column }) {
      const place = row * this.columns + column;
      return this.order ? this.order.indexOf(place) : place + this.preview;
    }
    known = (round) => this.starts[Math.min(round, this.rounds)];
    roundOf = (token) => this.starts.findLastIndex((start) => start <= token) + 1;
    /** What was drafted in a round, 1 to `rounds`: depth, token and fate of every node. */
    drafts(round) {
      if (!this.fate) return [];
      const [from, to] = [this.nodeStarts[round - 1], this.nodeStarts[round]];
      const found = [];
      for (let node = from; node < to; node++) {
        const parent = this.parent[node];
        const depth = parent < 0 ? 1 : found[parent].depth + 1;
        found.push({ depth, token: this.drafted[node], fate: this.fate[node] });
      }
      return found;
    }
  }

  const ramp = (share) => `color-mix(in srgb, ${RAMP[1]} ${100 * Math.min(share, 1)}%, ${RAMP[0]})`;

  /** Fill a cell by how its token came about; a line and a dot say it without colour. */
  function stamp(pen, origin, x, y, size) {
    pen.globalAlpha = 0.62;
    pen.fillStyle = ORIGINS[origin][1];
    pen.fillRect(x, y, size, size);
    pen.globalAlpha = 1;
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
  }
  const logText = (value) => (value >= 65535 ? "below −65.5" : `−${(value / 1000).toFixed(3)}`);

  /** One side of the viewer: a canvas with a picture, its tokens and a cursor. */
  class Pane {
    constructor(run, prompt) {
      Object.assign(this, { run: data.runs[run], prompt, cursor: null });
      this.replay = prompt.replay ? new Replay(prompt.replay) : null;
      this.canvas = make("canvas", { tabindex: 0, role: "img" });
      this.caption = make("figcaption");
      this.figure = make("figure", {}, this.canvas, this.caption);
      this.picture = new Image();
      this.ready = new Promise((done) => {
        this.picture.onload = this.picture.onerror = done;
        if (prompt.picture === null) done();
        else this.picture.src = data.pictures[prompt.picture];
      });
      for (const kind of ["pointermove", "pointerdown"])
        this.canvas.addEventListener(kind, (event) => this.point(event));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
    }
    size() {
      const { replay, picture } = this;
      const columns = replay ? replay.columns - replay.blank : picture.naturalWidth || 1;
      const rows = replay ? replay.rows : picture.naturalHeight || 1;
      const unit = 640 / Math.max(columns, rows);
      this.cell = replay ? Math.max(1, Math.round(unit)) : unit;
      this.canvas.width = Math.round(columns * this.cell);
      this.canvas.height = Math.round(rows * this.cell);
      this.figure.style.setProperty("--shape", columns / rows);
    }
    /** Slider units that a round takes: seconds, or one round. */
    get pace() {
      return viewer.inTime ? this.run.pace : 1;
    }
    /** Rounds that have ended now; times are sums, so a round may end a hair later than computed. */
    roundAt(now) {
      return Math.floor(now / this.pace + 1e-6);
    }
    paint(now, mode) {
      this.size();
      const round = this.roundAt(now);
      const { canvas, replay, picture } = this;
      const pen = canvas.getContext("2d");
      pen.imageSmoothingEnabled = picture.naturalWidth > 200;
      if (picture.naturalWidth) pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
      if (!replay)
        return this.say(this.run.decoded ? "no replay stored" : "drawn by other code", "finished");
      const known = replay.known(round);
      for (let token = 0; token < replay.length; token++) this.fill(pen, token, known, mode);
      if (round >= 1 && known < replay.length) this.marks(pen, round);
      if (this.cursor) {
        this.frame(pen, this.cursor, "#000", 5);
        this.frame(pen, this.cursor, "#fff", 2);
      }
      const all = replay.length;
      const clock = viewer.inTime ? seconds(Math.min(now, replay.rounds * this.pace)) : null;
      if (known === all)
        this.say(`finished, ${all} tokens in ${replay.rounds} rounds`, "finished", clock);
      else this.say(`${known} of ${all} tokens after ${round} rounds`, `${known}/${all}`, clock);
    }
    say(text, stage, clock = null) {
      const time = clock && make("b", { class: "clock" }, clock);
      this.caption.replaceChildren(...[time, `${this.run.name}: ${text}`].filter(Boolean));
      const told = [this.run.name, clock, text].filter(Boolean).join(", ");
      this.canvas.setAttribute("aria-label", `${told}. ${this.prompt.text}`);
      this.canvas.dataset.stage = stage;
    }
    fill(pen, token, known, mode) {
      const place = this.replay.cell(token);
      if (!place) return;
      const size = this.cell;
      const [x, y] = [place.column * size, place.row * size];
      pen.fillStyle = "#7773";
      if (token >= known) {
        pen.clearRect(x, y, size, size);
        pen.fillRect(x, y, size, size);
      } else if (mode === "origin") {
        stamp(pen, this.replay.origin[token], x, y, size);
      } else if (mode === "depth" || (mode === "logprob" && this.replay.logprob)) {
        const of = { depth: viewer.deepest, logprob: viewer.lowest }[mode];
        const share = this.replay[mode][token] / of;
        pen.globalAlpha = 0.85;
        pen.fillStyle = ramp(mode === "depth" ? share : Math.max(0, 1 - share));
        pen.fillRect(x, y, size, size);
        pen.globalAlpha = 1;
      }
    }
    frame(pen, place, colour, width, dash = []) {
      const size = this.cell;
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.setLineDash(dash);
      const [x, y] = [place.column * size + width / 2, place.row * size + width / 2];
      pen.strokeRect(x, y, size - width, size - width);
      pen.setLineDash([]);
    }
    /** The round's tokens framed; a cross: drafts were rejected, a dashed frame: none was tested. */
    marks(pen, round) {
      const { replay, cell: size } = this;
      const [start, end] = [replay.starts[round - 1], replay.starts[round]];
      const fates = new Map();
      for (const { depth, fate } of replay.drafts(round))
        fates.set(depth, Math.max(fate, fates.get(depth) || 0));
      const furthest = fates.size ? Math.max(...fates.keys()) : replay.nodes[round - 1];
      const width = Math.max(2, size / 9);
      for (let token = start; token < Math.min(start + furthest, replay.length); token++) {
        const place = replay.cell(token);
        if (!place) continue;
        if (token >= end) this.frame(pen, place, "#888", width, [size / 5, size / 7]);
        if (fates.get(token - start + 1) !== 1) continue;
        const [x, y] = [(place.column + 0.5) * size, (place.row + 0.5) * size];
        pen.strokeStyle = "#fff";
        pen.lineWidth = Math.max(2, size / 12);
        for (const sign of [1, -1]) {
          pen.beginPath();
          pen.moveTo(x - size / 4, y - (sign * size) / 4);
          pen.lineTo(x + size / 4, y + (sign * size) / 4);
          pen.stroke();
        }
      }
      for (let token = start; token < end; token++) {
        const place = replay.cell(token);
        if (place) this.frame(pen, place, ORIGINS[replay.origin[token]][1], width);
      }
    }
    point(event) {
      const box = this.canvas.getBoundingClientRect();
      const cells = (pixels) => Math.floor((pixels * this.canvas.width) / box.width / this.cell);
      this.go(cells(event.clientY - box.top), cells(event.clientX - box.left));
    }
    key(event) {
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      const from = this.cursor || { row: -step[0], column: -step[1] };
      this.go(from.row + step[0], from.column + step[1]);
    }
    go(row, column) {
      const { replay } = this;
      if (!replay) return;
      const clamped = (value, count) => Math.min(Math.max(value, 0), count - 1);
      for (const pane of viewer.panes) pane.cursor = null;
      const columns = replay.columns - replay.blank;
      this.cursor = { row: clamped(row, replay.rows), column: clamped(column, columns) };
      viewer.show(viewer.now);
      at("token").textContent = this.about();
    }
    about() {
      const { replay, cursor } = this;
      const token = replay.tokenAt(cursor);
      const origin = replay.origin[token];
      return [
        `${this.run.name}, row ${cursor.row + 1}, column ${cursor.column + 1}`,
        replay.tokens && `token ${replay.tokens[token]}`,
        origin === ACCEPTED
          ? `accepted draft at depth ${replay.depth[token]}`
          : ORIGINS[origin][0].replace(":", ","),
        replay.logprob && `log-probability ${logText(replay.logprob[token])}`,
        `round ${replay.roundOf(token)}`,
      ].filter(Boolean).join(" · ");
    }
  }

  const viewer = {
    panes: [],
    mode: "origin",
    unit: "time",
    now: 0, // in seconds or rounds
    timer: null,
    /** Whether the slider counts seconds: where every run that is shown was timed. */
    get inTime() {
      return this.unit === "time" && this.timed;
    },
    async open(run, prompt, beside) {
      const other = same(beside, prompt);
      this.panes = [...(other ? [new Pane(beside, other)] : []), new Pane(run, prompt)];
      const replayed = this.panes.filter((pane) => pane.replay);
      const replays = replayed.map((pane) => pane.replay);
      this.main = replayed.at(-1) || this.panes.at(-1);
      this.timed = replayed.every((pane) => pane.run.pace !== null);
      this.deepest = Math.max(1, ...replays.flatMap((replay) => replay.depth));
      const low = replays.flatMap((replay) => replay.logprob || []).sort((a, b) => a - b);
      this.lowest = low[Math.floor(0.98 * low.length)] || 1;
      at("viewer-title").textContent = prompt.text;
      at("stage").replaceChildren(...this.panes.map((pane) => pane.figure));
      at("player").hidden = at("modes").hidden = !replays.length;
      at("unit").hidden = !this.timed;
      const hint = "Point at a cell, or focus the picture and use the arrow keys.";
      at("token").textContent = replays.length ? hint : "";
      this.modes(low.length > 0);
      at("viewer").showModal();
      await Promise.all(this.panes.map((pane) => pane.ready));
      this.count(this.unit);
    },
    /** Count in seconds ("time") or in rounds, from the end. */
    count(unit) {
      this.stop();
      this.unit = unit;
      const ends = this.panes.map((pane) => (pane.replay ? pane.replay.rounds * pane.pace : 0));
      this.end = Math.max(...ends);
      at("round").max = this.end;
      at("unit").value = unit;
      this.show(this.end);
    },
    modes(logprob) {
      const known = { origin: "origin", picture: "picture", depth: "depth of the draft" };
      if (logprob) known.logprob = "log-probability";
      if (!known[this.mode]) this.mode = "origin";
      at("modes").replaceChildren(
        ...Object.entries(known).map(([value, text]) => {
          const onchange = () => this.show(this.now, (this.mode = value));
          const choice = make("input", { type: "radio", name: "mode", value, onchange });
          choice.checked = value === this.mode;
          return make("label", {}, choice, text);
        }),
      );
    },
    show(now) {
      this.now = Math.min(Math.max(now, 0), this.end);
      at("round").value = this.now;
      for (const pane of this.panes) pane.paint(this.now, this.mode);
      this.key();
      this.describe();
    },
    key() {
      const ends = {
        depth: ["0, drawn", `depth ${this.deepest}`],
        logprob: [`${logText(this.lowest)} or less`, "0"],
      }[this.mode];
      if (ends) {
        const colours = `background:linear-gradient(90deg,${RAMP.join(",")})`;
        at("key").replaceChildren(ends[0], make("span", { class: "ramp", style: colours }), ends[1]);
        return;
      }
      const swatches = ORIGINS.map(([text], origin) => {
        const swatch = make("canvas", { width: 18, height: 18, "aria-hidden": "true" });
        stamp(swatch.getContext("2d"), origin, 0, 0, 18);
        return make("span", {}, swatch, text);
      });
      at("key").replaceChildren(...swatches.reverse());
    },
    describe() {
      const { replay, run } = this.main;
      const round = this.main.roundAt(this.now);
      at("drafted").replaceChildren();
      if (!replay) return;
      const tell = (words) =>
        (at("round-text").textContent = `${run.name}, ${words}.`);
      if (round === 0) return tell("no tokens yet");
      if (round > replay.rounds) return tell(`finished in round ${replay.rounds}`);
      const emitted = replay.origin.slice(replay.starts[round - 1], replay.starts[round]);
      const last = emitted.at(-1);
      const drafts = replay.drafts(round);
      const count = (fate) => drafts.filter((one) => one.fate === fate).length;
      const shown = emitted.filter((one) => one === ACCEPTED).length;
      const accepted = drafts.length ? count(2) : shown; // drafts may reach beyond the image
      const parts = [`${replay.nodes[round - 1]} drafted`, `${accepted} accepted`];
      if (drafts.length) parts.push(`${count(1)} rejected`, `${count(0)} not tested`);
      const drawn = `then one drawn from the ${last === RESAMPLED ? "residual" : "target"}`;
      const end = last === ACCEPTED ? `of which the image needed ${shown}` : drawn;
      tell(`round ${round} of ${replay.rounds}: ${[...parts, end].join(", ")}`);
      this.list(drafts);
    },
    list(drafts) {
      for (const depth of unique(drafts.map((one) => one.depth)).sort((a, b) => a - b)) {
        const level = drafts.filter((one) => one.depth === depth).sort((a, b) => b.fate - a.fate);
        const nodes = level.slice(0, 4).map(({ token, fate }) =>
          make("span", { class: FATES[fate] }, `${"–✗✓"[fate]} ${token}`),
        );
        const more = level.length > 4 ? ` and ${level.length - 4} more` : "";
        at("drafted").append(make("li", {}, make("b", {}, `depth ${depth}`), ...nodes, more));
      }
    },
    play() {
      if (this.timer) return this.stop();
      if (this.now >= this.end) this.show(0);
      at("play").textContent = "Pause";
      this.timer = setInterval(() => {
        this.show(this.now + (this.end * TICK) / 1000 / PLAYED);
        if (this.now >= this.end) this.stop();
      }, TICK);
    },
    stop() {
      clearInterval(this.timer);
      this.timer = null;
      at("play").textContent = "Play";
    },
    to(now) {
      this.stop();
      this.show(now);
    },
    /** Go on or back by rounds of the picture that is described. */
    step(rounds) {
      const round = this.main.roundAt(this.now);
      const past = this.main.replay.rounds + 1; // where a slower picture beside it goes on
      this.to(((rounds < 0 ? Math.min(round, past) : round) + rounds) * this.main.pace);
    },
  };

  // ---- start -----------------------------------------------------------------------------------

  function theme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    at("theme").textContent = dark ? "Light" : "Dark";
    return chart();
  }
  const fill = (id, pairs, chosen) => {
    at(id).replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
    at(id).value = chosen ?? "";
  };
  const on = (id, event, does) => at(id).addEventListener(event, does);
  const keys = data.metrics.map((one) => one.key);
  const axes = data.metrics.map((one) => [one.key, one.heading]);
  const prefer = (...wanted) => wanted.find((key) => keys.includes(key)) || keys[0];
  fill("model", models.map((model) => [model, model]), data.runs[state.run].model);
  fill("axis-x", axes, prefer("speedup", "accepted_length"));
  fill("axis-y", axes, prefer("fid", "clip_score", "kl_per_token"));
  const runs = data.runs.map((run, number) => [number, run.name]);
  fill("run", runs, state.run);
  fill("beside", [["", "nothing"], ...runs], null);
  [at("model-label").hidden, at("frontier").hidden] = [models.length < 2, !data.chart];
  for (const id of ["model", "axis-x", "axis-y"]) on(id, "change", chart);
  on("theme", "click", () => theme(!isDark()));
  on("run", "change", (event) => choose(Number(event.target.value)));
  on("beside", "change", (event) => {
    state.beside = event.target.value === "" ? null : Number(event.target.value);
    gallery();
  });
  on("close", "click", () => at("viewer").close());
  on("viewer", "close", () => viewer.stop());
  on("viewer", "click", (event) => event.target === at("viewer") && at("viewer").close());
  on("play", "click", () => viewer.play());
  on("back", "click", () => viewer.step(-1));
  on("forward", "click", () => viewer.step(1));
  on("round", "input", (event) => viewer.to(Number(event.target.value)));
  on("unit", "change", (event) => viewer.count(event.target.value));
  state.beside = data.runs[state.run].reference;
  gallery();
  const wide = () => {
    for (const table of document.querySelectorAll(".wide"))
      table.classList.toggle("scrolls", table.scrollWidth > table.clientWidth);
  };
  addEventListener("resize", wide);
  wide();
  theme(matchMedia("(prefers-color-scheme: dark)").matches).then(() => {
    document.documentElement.dataset.ready = "true";
  });
})();
