"use strict";
// The views. An address is #/, #/run/NAME/VIEW or #/compare/NAME/NAME; each is drawn again when its files change.

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const said = document.getElementById("said");
let stream = null;
let listen = () => {}; // opens the stream of changes of what is shown
let missed = null; // what is to be drawn when nothing in main has the focus any more
let turn = 0;

const VIEWS = {
  overview: { title: "Overview", files: ["metrics.jsonl", "status.json", "summary.json", "run.lock"], draw: overview },
  timeline: { title: "Timeline", files: ["timeline.json", "status.json"], draw: timeline },
  staleness: { title: "Staleness", files: ["metrics.jsonl", "summary.json"], draw: staleness },
  weights: { title: "Weights and replicas", files: ["metrics.jsonl", "status.json", "summary.json", "run.lock"], draw: weights },
  rollouts: { title: "Rollouts", files: ["trajectories.jsonl"], draw: rollouts },
  failures: { title: "Failures", files: ["summary.json", "logs/driver.log"], draw: failures },
};

async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
const runPath = (name, rest) => `/api/runs/${encodeURIComponent(name)}/${rest}`;
const runLink = (name, view = "overview") => `#/run/${encodeURIComponent(name)}/${view}`;

function show() {
  const mine = ++turn;
  if (stream) stream.close();
  stream = missed = null;
  const [place, ...names] = location.hash.replace(/^#\//, "").split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  let first = true;
  let drawing = false;
  let again = false; // something changed while a view was drawn
  const draw = async () => {
    again = drawing;
    if (drawing || mine !== turn) return;
    drawing = true;
    await drawView(mine, place, names, first);
    first = drawing = false;
    if (again) changed();
  };
  const changed = () => {
    if (busy()) missed = draw;
    else draw();
  };
  const view = VIEWS[names[1]] || VIEWS.overview;
  listen = () => {
    if (place !== "run" || document.hidden) return;
    stream = new EventSource(runPath(names[0], "events"));
    stream.onmessage = (event) => { // the first one of a connection names all files: no change before it is lost
      if (first) draw();
      else if (!JSON.parse(event.data).some((file) => view.files.includes(file))) return;
      else changed();
    };
    stream.onerror = () => first && draw(); // which shows what is wrong
  };
  listen();
  if (!stream) draw();
}

document.addEventListener("visibilitychange", () => { // a browser opens six connections to an address, for all tabs
  if (stream) stream.close();
  stream = null;
  listen();
});

let pressed = false; // what is pressed must not be replaced before it is clicked
const busy = () => pressed || (main.contains(document.activeElement) && document.activeElement !== main);
const catchUp = () => setTimeout(() => { // then it is known what has the focus next, and a click has been handled
  if (!missed || busy()) return;
  missed();
  missed = null;
});
main.addEventListener("focusout", catchUp);
main.addEventListener("pointerdown", () => { pressed = true; });
for (const end of ["pointerup", "pointercancel"]) {
  document.addEventListener(end, () => setTimeout(() => {
    pressed = false;
    catchUp();
  }));
}

async function drawView(mine, place, names, first) {
  try {
    let drawn;
    if (place === "run") {
      const view = VIEWS[names[1]] ? names[1] : "overview";
      drawn = await VIEWS[view].draw(names[0]);
      if (mine !== turn) return;
      navigate(names[0], view);
      document.title = `${names[0]} · ${VIEWS[view].title} · asyncrl`;
    } else {
      drawn = place === "compare" ? await compare(names[0], names[1]) : await runs();
      if (mine !== turn) return;
      nav.replaceChildren();
      document.title = place === "compare" ? "Compare · asyncrl" : "asyncrl";
    }
    const scrolled = window.scrollY;
    main.replaceChildren(...drawn.flat().filter((each) => each));
    drawCharts();
    if (first) main.focus({ preventScroll: true });
    window.scrollTo(0, first ? 0 : scrolled);
    said.textContent = first ? document.title : "";
  } catch (error) {
    if (mine !== turn || !first) return;
    main.replaceChildren(make("h1", {}, "This cannot be shown"), make("p", { class: "bad" }, error.message));
  }
}

function navigate(name, current) {
  nav.replaceChildren(...Object.entries(VIEWS).map(([view, { title }]) =>
    make("a", { href: runLink(name, view), "aria-current": view === current ? "page" : null }, title)));
}

const table = (head, rows, numbers = []) => make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head.filter(Boolean).join(", ") },
  make("table", {},
    make("thead", {}, make("tr", {}, head.map((text, at) => make("th", { scope: "col", class: numbers.includes(at) ? "number" : null }, text)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell, at) => make("td", { class: numbers.includes(at) ? "number" : null }, cell)))))));
const heading = (name, state) => make("h1", {}, name, make("span", { class: "soft" }, state ? ` · ${state}` : ""));

// ------------------------------------------------------------------------------------------------------------ all runs

async function runs() {
  const { folder, alone, runs: found } = await get("/api/runs");
  if (alone && found.length === 1 && location.hash.length < 3) {
    location.replace(runLink(found[0].name));
    return [];
  }
  const parts = [heading("Runs", folder)];
  if (!found.length) return [...parts, make("p", {}, "There is no run in this folder.")];
  const rows = found.map((run) => [
    make("a", { href: runLink(run.name) }, run.name), run.state,
    `${short(run.step)}${run.steps ? ` of ${short(run.steps)}` : ""}`, short(run.reward), short(run.success),
    run.time_s ? `${short(Math.round(run.time_s / 6) / 10)} min` : "–",
  ]);
  parts.push(table(["run", "state", "step", "reward", "held-out success", "time"], rows, [2, 3, 4, 5]));
  if (found.length > 1) {
    const choice = (label, at) => {
      const select = make("select", {}, found.map(({ name }) => make("option", { value: name }, name)));
      select.selectedIndex = at;
      return [make("label", {}, label, select), select];
    };
    const [left, one] = choice("one run", 0);
    const [right, other] = choice("another", 1);
    const go = (event) => {
      event.preventDefault();
      location.hash = `#/compare/${encodeURIComponent(one.value)}/${encodeURIComponent(other.value)}`;
    };
    parts.push(make("h2", {}, "Side by side"), make("form", { onsubmit: go }, left, right, make("button", {}, "Compare")));
  }
  return parts;
}

// ------------------------------------------------------------------------------------------------------------- one run

const CHARTS = [
  ["Reward", ["reward_mean", "reward_std"]], ["Length", ["length_mean"], "tokens"],
  ["KL", ["train/policy_kl", "train/behaviour_kl", "train/reference_kl", "train/reward_kl"]], ["Entropy", ["train/entropy"]],
  ["Clipped, masked, without signal", ["train/clip_fraction", "masked_share", "groups_without_signal"]],
  ["Gradient norm", ["train/grad_norm"]], ["Learning rate", ["train/lr"]], ["Loss", ["train/loss"]],
  ["Tokens per second", ["tokens_per_s"]], ["Effective sample share", ["train/effective_sample_share"]],
];

const chartsOf = (curves, wanted) => wanted
  .map(([title, names, unit]) => [title, names.filter((name) => curves[name]), unit])
  .filter(([, names]) => names.length)
  .map(([title, names, unit]) => chart(title, curves.step, names.map((name) => ({ label: name, values: curves[name] })), { unit }));

function damageOf(damaged) {
  const parts = Object.entries(damaged).map(([file, lines]) => file.endsWith(".jsonl") ? `${file}: ${lines} lines` : file);
  return parts.length ? make("p", { class: "bad" }, `Damaged, and left out: ${parts.join(", ")}`) : null;
}

async function overview(name) {
  const run = await get(runPath(name, "overview"));
  const of = run.steps ? ` of ${short(run.steps)}` : "";
  const parts = [heading(name, run.state), make("p", {}, `step ${short(run.step)}${of}`), damageOf(run.damaged)];
  if (run.state === "ended" && run.status && run.status.failed) {
    parts.push(make("p", { class: "advice" }, `The run failed: ${run.status.failed}`));
  }
  if (run.advice) parts.push(make("p", { class: "advice" }, `${run.advice.sentence[0].toUpperCase()}${run.advice.sentence.slice(1)}.`));
  const drawn = [];
  if (run.scores.step) drawn.push(chart("Held-out success", run.scores.step, [{ label: "success", values: run.scores["eval/success"] }]));
  drawn.push(...chartsOf(run.curves, CHARTS));
  if (!drawn.length && run.warm_start.line) {
    drawn.push(chart("Loss of the warm start", run.warm_start.line, [{ label: "loss", values: run.warm_start["sft/loss"] }]));
  }
  parts.push(drawn.length ? make("div", { class: "cards" }, drawn) : make("p", { class: "soft" }, "No step is done yet."));
  parts.push(...idleOf(run.idle));
  if (run.state === "training" && run.status) {
    const waits = run.status.waits.map((wait) => `${wait.owner} has waited ${short(wait.for_s)} s for ${wait.reason}`);
    const work = run.status.work.map((each) => `${each.stage}: ${each.name}, for ${short(each.for_s)} s`);
    parts.push(make("h2", {}, "Now"), make("ul", {}, [...waits, ...run.status.causes, ...work].map((line) => make("li", {}, line))));
  }
  return parts;
}

function idleOf(idle) {
  const processes = Object.entries(idle);
  if (!processes.length) return [];
  const causes = [...new Set(processes.flatMap(([, shares]) => Object.keys(shares).filter((cause) => shares[cause] >= 0.05)))];
  const rows = processes.map(([process, shares]) => {
    const most = Object.entries(shares).sort((a, b) => b[1] - a[1]).slice(0, 3);
    return [process, bar(shares), most.map(([cause, share]) => `${cause} ${share.toFixed(1)} %`).join(", ")];
  });
  return [make("h2", {}, "Where the time of each process goes"), make("p", {}, causes.map(keyOf)), table(["process", "share of the time", "most of it"], rows)];
}

let window_ = null;
async function timeline(name) {
  if (!window_ || window_.name !== name) window_ = { name, start: 0, end: null };
  const bins = Math.min(Math.max(Math.round(main.clientWidth || 600), 200), 1500);
  const query = `start=${window_.start}&bins=${bins}${window_.end ? `&end=${window_.end}` : ""}`;
  const [found, run] = await Promise.all([get(runPath(name, `timeline?${query}`)), get(runPath(name, "overview"))]);
  const parts = [heading(name, "timeline")];
  if (found.whole_s > 0) {
    const move = (start, end) => () => {
      const span = Math.max(end - start, 1e-3);
      const from = Math.max(0, Math.min(start, found.whole_s - span));
      window_ = { name, start: from, end: Math.min(from + span, found.whole_s) };
      show();
    };
    const [from, to, span] = [found.start_s, found.end_s, found.end_s - found.start_s];
    const button = (label, act) => make("button", { type: "button", onclick: act }, label);
    parts.push(make("p", {}, `${short(from)} s to ${short(to)} s of ${short(found.whole_s)} s`), make("form", {},
      button("Closer", move(from + span / 4, to - span / 4)), button("Wider", move(from - span / 2, to + span / 2)),
      button("Earlier", move(from - span / 2, to - span / 2)), button("Later", move(from + span / 2, to + span / 2)),
      button("All", move(0, found.whole_s))));
    if (!found.rows.length) return [...parts, make("p", {}, "Nothing was recorded in this time."), ...idleOf(run.idle)];
    const stages = [...new Set(found.rows.map((row) => row.stage))];
    parts.push(make("p", {}, [...new Set(found.rows.map((row) => row.name))].slice(0, 24).map(keyOf), make("span", { class: "soft" }, "pale: waits for it")));
    for (const each of stages) {
      parts.push(make("p", { class: "stage-name" }, each), stage(found.rows.filter((row) => row.stage === each), bins));
    }
    const rows = found.rows.map((row) => [row.stage, row.kind === "wait" ? `waits for ${row.name}` : row.name, row.seconds.toFixed(2), `${(100 * row.seconds / span).toFixed(1)} %`]);
    parts.push(make("h2", {}, "In figures"), make("p", { class: "soft" }, "What goes on side by side adds up."), table(["stage", "what", "seconds", "of the time shown"], rows, [2, 3]));
  } else {
    parts.push(make("p", {}, found.damaged ? "timeline.json is damaged." : "There is no timeline yet: it is written every few seconds while a run trains."));
  }
  return [...parts, ...idleOf(run.idle)];
}

async function staleness(name) {
  const { curves, summary } = await get(runPath(name, "overview"));
  const ages = Object.keys(curves).filter((key) => /^staleness\/\d+$/.test(key)).sort((a, b) => parseInt(a.slice(10)) - parseInt(b.slice(10)));
  const parts = [heading(name, "staleness, queue and buffer")];
  if (!curves.step) return [...parts, make("p", { class: "soft" }, "No step is done yet.")];
  parts.push(make("div", { class: "cards" }, chartsOf(curves, [
    ["Staleness of the tokens of a step", ["staleness_max", "staleness_mean"], "versions"], ["Tokens of a step by staleness", ages, "tokens"],
    ["Groups in the buffer", ["groups_ready", "groups_pending"]], ["Tokens masked and dropped", ["masked_tokens", "dropped_tokens"]],
    ["Importance ratio to the behaviour policy", ["train/behaviour_ratio", "train/behaviour_weight"]], ["Length ratio", ["length_ratio"]],
  ])));
  if (summary) {
    const tokens = Object.entries(summary.staleness.histogram);
    const all = tokens.reduce((sum, [, count]) => sum + count, 0) || 1;
    parts.push(make("h2", {}, `All tokens trained on (bound ${summary.max_staleness})`),
      table(["staleness", "tokens", "share"], tokens.map(([age, count]) => [age, short(count), `${(100 * count / all).toFixed(1)} %`]), [1, 2]));
  }
  return parts;
}

async function weights(name) {
  const { curves, idle, status, summary, state } = await get(runPath(name, "overview"));
  const parts = [heading(name, "weights and replicas")];
  if (summary) parts.push(make("p", {}, `The pool served weight version ${short(summary.weight_version)} at the end.`));
  if (curves.time_s) parts.push(make("div", { class: "cards" }, chart("Weight version over time", curves.time_s, [{ label: "version", values: curves.version }], { x: "seconds" })));
  const replicas = Object.entries(idle).filter(([process]) => !["trainer", "driver", "reward", "reference", "critic"].includes(process));
  if (replicas.length) parts.push(...idleOf(Object.fromEntries(replicas)));
  if (status && state === "training") {
    parts.push(make("h2", {}, "Health"), make("ul", {}, status.causes.filter((cause) => cause.startsWith("replica ")).map((cause) => make("li", {}, cause))));
  }
  return parts;
}

async function failures(name) {
  const { failures: found, tokens, log } = await get(runPath(name, "failures"));
  const causes = Object.entries(found).sort((a, b) => b[1].count - a[1].count);
  const dropped = Object.entries(tokens.dropped || {}).sort((a, b) => b[1] - a[1]);
  const parts = [heading(name, "failures")];
  parts.push(make("h2", {}, "Failed attempts of episodes, by cause"));
  if (!causes.length) parts.push(make("p", { class: "soft" }, "None in summary.json, which a run writes at its end."));
  for (const [cause, { count, example }] of causes) parts.push(make("p", {}, make("strong", {}, `${short(count)} times `), cause), make("pre", { tabindex: "0" }, example));
  if (dropped.length) parts.push(make("h2", {}, "Tokens that were not trained on"), table(["reason", "tokens"], dropped.map(([reason, count]) => [reason, short(count)]), [1]));
  parts.push(make("h2", {}, "End of the log"), make("pre", { tabindex: "0" }, log || "There is nothing in the log."));
  return parts;
}

// ------------------------------------------------------------------------------------------------------------ rollouts

const MOST_SEARCHES = 40;
let filters = {};
async function rollouts(name) {
  const [, , , , number] = location.hash.split("/");
  if (number) return rollout(name, Number(number));
  const mine = location.hash;
  const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value !== ""));
  const found = await get(runPath(name, `rollouts?${query}`));
  for (let part = 0; part < MOST_SEARCHES && found.before && found.rollouts.length < 50 && location.hash === mine; part += 1) {
    query.set("before", found.before); // a search for a text answers in parts
    const next = await get(runPath(name, `rollouts?${query}`));
    found.rollouts.push(...next.rollouts);
    found.before = next.before;
  }
  const field = (label, key, type = "number") => make("label", {}, label, make("input", { type, name: key, value: filters[key] ?? "", step: "any" }));
  const choose = (event) => {
    event.preventDefault();
    filters = Object.fromEntries(new FormData(event.target));
    document.activeElement.blur();
    show();
  };
  const rows = found.rollouts.map((each) => [
    make("a", { href: `${runLink(name, "rollouts")}/${each.number}` }, each.title || "(empty)"),
    short(each.step), short(each.reward), short(each.tokens), each.finish,
  ]);
  const next = found.before && make("button", { type: "button", onclick: () => { filters.before = found.before; show(); } }, "Older ones");
  return [
    heading(name, "rollouts"),
    make("p", { class: "soft" }, `${short(found.all)} were written to read (telemetry.trajectories_per_step).`), damageOf(found.damaged),
    make("form", { onsubmit: choose }, field("step", "step"), field("reward from", "least"), field("to", "most"), field("tokens from", "longer"),
      field("with the text", "text", "search"), make("button", {}, "Show")),
    rows.length ? table(["rollout", "step", "reward", "tokens", "end"], rows, [1, 2, 3]) : make("p", {}, "None."), next || null,
  ];
}

async function rollout(name, number) {
  const found = await get(runPath(name, `rollouts/${number}`));
  const facts = [["step", found.step], ["group", found.group_id], ["reward", found.reward], ["end", found.finish], ["weight versions", (found.weight_versions || []).join(", ")]];
  for (const [part, value] of Object.entries(found.reward_parts || {})) facts.push([`reward: ${part}`, value]);
  const parts = [heading(name, `rollout ${number}`), make("p", {}, make("a", { href: runLink(name, "rollouts") }, "All rollouts"))];
  parts.push(table(["", ""], facts.map(([key, value]) => [key, short(value)])));
  const about = make("p", { role: "status" }, "Point at a token, or walk with the arrow keys: underlined ones were sampled, in the colour of their weight version; the unlikely ones are shaded.");
  if (Array.isArray(found.tokens)) {
    const versions = [...new Set(found.tokens.filter((token) => token.length > 1).map((token) => token[2]))].sort((a, b) => a - b);
    const spans = found.tokens.map(([text, logProb, version]) => make("span", {
      class: logProb === undefined ? null : `sampled v${versions.indexOf(version) % 4}${Math.exp(logProb) < 0.1 ? " unlikely" : ""}`,
    }, text));
    let at = -1;
    const point = (next) => {
      if (next < 0 || next >= spans.length) return;
      if (at >= 0) spans[at].classList.remove("chosen");
      spans[at = next].classList.add("chosen");
      const [text, logProb, version] = found.tokens[at];
      about.textContent = `token ${at}, ${JSON.stringify(text)}: ` + (logProb === undefined ? "not sampled, masked out of the loss"
        : `probability ${short(Math.exp(logProb))} (log ${short(logProb)}), sampled by version ${version}`);
    };
    const box = make("div", { class: "tokens", tabindex: "0", role: "application", "aria-label": "Tokens",
      onmouseover: (event) => point(spans.indexOf(event.target)),
      onkeydown: (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
        if (move) { point(at + move); event.preventDefault(); }
      } }, spans);
    parts.push(make("h2", {}, "Tokens"), about, box);
  } else {
    parts.push(make("h2", {}, "Text"), make("pre", { tabindex: "0" }, String(found.text ?? "")));
  }
  parts.push(make("h2", {}, "Task"), make("pre", { tabindex: "0" }, JSON.stringify(found.task, null, 2)));
  return parts;
}

// ------------------------------------------------------------------------------------------------------- two runs

async function compare(one, other) {
  const [left, right] = await Promise.all([one, other].map((name) => get(runPath(name, "overview"))));
  const names = [...new Set([...Object.keys(left.curves), ...Object.keys(right.curves)])]
    .filter((name) => !["step", "time_s", "version"].includes(name) && !name.startsWith("staleness/"));
  const steps = [...new Set([...(left.curves.step || []), ...(right.curves.step || [])])].sort((a, b) => a - b);
  const along = (curves, name, key = "step") => {
    const at = new Map((curves[key] || []).map((step, index) => [step, (curves[name] || [])[index]]));
    return steps.map((step) => at.get(step) ?? null);
  };
  const drawn = names.map((name) => chart(name, steps, [{ label: one, values: along(left.curves, name) }, { label: other, values: along(right.curves, name) }]));
  const line = (title, read) => [title, short(read(left)), short(read(right))];
  return [
    heading("Two runs"),
    table(["", one, other], [
      ["run", make("a", { href: runLink(one) }, one), make("a", { href: runLink(other) }, other)],
      line("state", (run) => run.state), line("step", (run) => run.step), line("last reward", (run) => (run.curves.reward_mean || []).at(-1)),
      line("held-out success", (run) => (run.scores["eval/success"] || []).at(-1)), line("bottleneck", (run) => run.advice && run.advice.cause),
    ]),
    make("h2", {}, "Curves"), make("div", { class: "cards" }, drawn),
  ];
}

window.addEventListener("hashchange", () => { filters.before = ""; show(); });
show();
