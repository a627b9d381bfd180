// Looks at the pages of a registry with Chromium; `ui-check` says what is checked, and starts it.
//
//   node ui-check.mjs CHROMIUM AXE REGISTRY SCREENSHOTS PROFILE
//
// The environment has two tokens: PF_TOKEN may do everything, PF_READER may pull team/agent.
// The browser is driven over a pipe by its own protocol, so no library is needed.

import { spawn } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";

const [browserPath, axePath, registry, screenshots, profile] = process.argv.slice(2);
const { PF_TOKEN: operator, PF_READER: reader } = process.env;
const axe = readFileSync(axePath, "utf8");
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
const LOOKS = [
  { name: "light", width: 1280, scheme: "light" },
  { name: "dark", width: 1280, scheme: "dark" },
  { name: "narrow", width: 360, scheme: "light" },
];

const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
flags.push("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe", `--user-data-dir=${profile}`);
const browser = spawn(browserPath, flags, { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
const gone = new Promise((_, reject) => browser.on("exit", (code) => reject(new Error(`the browser ended: ${code}`))));
gone.catch(() => {});

// Commands and events of the browser: JSON documents that end with a NUL.
let last = 0;
let rest = "";
const waiting = new Map();
const listeners = new Set();
browser.stdio[4].setEncoding("utf8");
browser.stdio[4].on("data", (text) => {
  const documents = (rest + text).split("\0");
  rest = documents.pop();
  for (const message of documents.map((document) => JSON.parse(document))) {
    const answer = waiting.get(message.id);
    waiting.delete(message.id);
    if (answer) message.error ? answer.reject(new Error(`${answer.method}: ${message.error.message}`)) : answer.resolve(message.result);
    else for (const listener of listeners) listener(message);
  }
});
let session;
function call(method, params = {}) {
  const id = ++last;
  browser.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId: session })}\0`);
  return Promise.race([gone, new Promise((resolve, reject) => waiting.set(id, { method, resolve, reject }))]);
}
function next(method) {
  const event = new Promise((resolve) => {
    const listener = (message) => {
      if (message.method !== method) return;
      listeners.delete(listener);
      resolve(message.params);
    };
    listeners.add(listener);
  });
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error(`no ${method} within a minute`)), 60_000).unref());
  return Promise.race([gone, event, late]);
}
async function evaluate(expression) {
  const { result, exceptionDetails } = await call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
  if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
  return result.value;
}

// What the user enters when the browser asks for a password; null: the user cancels.
let password = null;
listeners.add(({ method, params }) => {
  if (method === "Fetch.requestPaused") call("Fetch.continueRequest", { requestId: params.requestId }).catch(() => {});
  if (method !== "Fetch.authRequired") return;
  const entered = { response: "ProvideCredentials", username: "me", password };
  const authChallengeResponse = password ? entered : { response: "CancelAuth" };
  call("Fetch.continueWithAuth", { requestId: params.requestId, authChallengeResponse }).catch(() => {});
});

const found = [];
let place = "";
const isRefused = () => ["missing", "sign-in", "hidden", "elsewhere"].some((name) => place.startsWith(name));
listeners.add(({ method, params }) => {
  if (method === "Log.entryAdded" && !(params.entry.source === "network" && isRefused())) {
    found.push(`${place}: the browser reports: ${params.entry.text}`);
  }
  if (method === "Runtime.consoleAPICalled" || method === "Runtime.exceptionThrown") found.push(`${place}: a script ran`);
  if (method === "Network.requestWillBeSent" && !params.request.url.startsWith(`${registry}/`) && !place.startsWith("elsewhere")) {
    found.push(`${place}: a request to ${params.request.url}`);
  }
});

async function open(path) {
  const loaded = next("Page.loadEventFired");
  await call("Page.navigate", { url: registry + path });
  await loaded;
}

// What is wrong with the page that is shown.
async function check(look) {
  await evaluate(axe);
  const violations = await evaluate(`axe.run(document, { runOnly: ${JSON.stringify(RULES)} }).then((report) =>
    report.violations.map((one) => one.id + ": " + one.help + ": " + one.nodes.slice(0, 3).map((node) => node.target + " " + node.failureSummary).join("; ")))`);
  found.push(...violations.map((violation) => `${place}: ${violation}`));
  const width = await evaluate("document.documentElement.scrollWidth");
  if (width > look.width) found.push(`${place}: the page is ${width} pixels wide`);
}

async function picture(look, name) {
  const { cssContentSize } = await call("Page.getLayoutMetrics");
  const clip = { x: 0, y: 0, width: look.width, height: Math.min(cssContentSize.height, 2400), scale: 1 };
  const { data } = await call("Page.captureScreenshot", { format: "png", clip, captureBeyondViewport: true });
  writeFileSync(`${screenshots}/${name}-${look.name}.png`, Buffer.from(data, "base64"));
}

async function press(key, code) {
  const event = { key, code: key, windowsVirtualKeyCode: code, ...(key === "Enter" ? { text: "\r" } : {}) };
  await call("Input.dispatchKeyEvent", { type: "keyDown", ...event });
  await call("Input.dispatchKeyEvent", { type: "keyUp", ...event });
}

// A new private window of a user with this token.
async function user(token) {
  session = undefined;
  const { browserContextId } = await call("Target.createBrowserContext");
  const { targetId } = await call("Target.createTarget", { url: "about:blank", browserContextId });
  session = (await call("Target.attachToTarget", { targetId, flatten: true })).sessionId;
  password = token;
  for (const domain of ["Page", "Runtime", "Log", "Network"]) await call(`${domain}.enable`);
  await call("Fetch.enable", { handleAuthRequests: true });
}

async function show(look) {
  await call("Emulation.setDeviceMetricsOverride", { width: look.width, height: 800, deviceScaleFactor: 1, mobile: false });
  await call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: look.scheme }] });
}

// Opens a page, which must have this heading, and looks at it.
async function visit(look, name, path, heading) {
  place = `${name}, ${look.name}`;
  await open(path);
  const h1 = await evaluate("document.querySelector('h1')?.textContent");
  if (heading && h1 !== heading) found.push(`${place}: the heading is ${h1}, and not ${heading}`);
  await check(look);
  await picture(look, name);
}

async function api(path) {
  const answer = await fetch(`${registry}/v1/${path}`, { headers: { Authorization: `Bearer ${operator}` } });
  return answer.json();
}

// A page of another site sends the form of a snapshot, and a request that needs no form.
async function elsewhere(form) {
  place = "elsewhere";
  const button = `<!DOCTYPE html><title>x</title><form method="post" action="${registry}${form}"><button>Win a prize</button></form>`;
  const site = createServer((_, answer) => answer.setHeader("Content-Type", "text/html").end(button));
  await new Promise((resolve) => site.listen(0, "127.0.0.1", resolve));
  const before = (await api("gc")).runs.length;
  const arrived = next("Page.loadEventFired");
  await call("Page.navigate", { url: `http://localhost:${site.address().port}/` });
  await arrived;
  const request = { method: "POST", mode: "no-cors", credentials: "include", body: "{}" };
  await evaluate(`fetch(${JSON.stringify(`${registry}/v1/gc`)}, ${JSON.stringify(request)}).then(() => {}, () => {})`);
  const answered = next("Page.loadEventFired");
  await evaluate("document.querySelector('button').click()");
  await answered;
  const text = await evaluate("document.querySelector('main')?.textContent ?? document.body.textContent");
  if (!text.includes("a page of another site")) found.push(`${place}: its form is answered with: ${text}`);
  if ((await api("gc")).runs.length !== before) found.push(`${place}: its request started a garbage collection`);
  site.close();
}

async function main() {
  await user(null);
  for (const look of LOOKS) {
    await show(look);
    await visit(look, "sign-in", "/", "Sign in");
  }
  await user(reader);
  for (const look of LOOKS) {
    await show(look);
    await visit(look, "reader", "/", "Overview");
    const text = await evaluate("document.body.textContent");
    if (!text.includes("team/agent") || text.includes("team/review")) found.push(`${place}: it does not show just what the token may pull`);
    await visit(look, "hidden", "/ui/team%2Freview", "No such repository");
  }
  await user(operator);
  const snapshots = async (repository) => (await api(`repositories/${encodeURIComponent(repository)}/snapshots`)).snapshots;
  const [agent, hybrid] = [await snapshots("team/agent"), await snapshots("team/hybrid")];
  const step = agent.find((one) => one.tags.includes("step-2"));
  const pages = {
    overview: "/",
    repositories: "/ui/-/repositories",
    storage: "/ui/-/storage",
    engines: "/ui/-/engines",
    tasks: "/ui/-/tasks",
    repository: "/ui/team%2Fagent",
    snapshot: `/ui/team%2Fagent/${step.digest}`,
    hybrid: `/ui/team%2Fhybrid/${hybrid[0].digest}`,
    missing: "/ui/team%2Fmissing",
    domain: "/domains/acme/",
    docs: "/docs",
  };
  for (const look of LOOKS) {
    await show(look);
    for (const [name, path] of Object.entries(pages)) await visit(look, name, path);
    // The first key press reaches the link that skips the navigation; the form works by keyboard.
    place = `verify, ${look.name}`;
    await open(pages.snapshot);
    await press("Tab", 9);
    if ((await evaluate("document.activeElement.className")) !== "skip") found.push(`${place}: the first link does not skip to the content`);
    await evaluate("document.querySelector('button').focus()");
    const loaded = next("Page.loadEventFired");
    await press("Enter", 13);
    await loaded;
    if ((await evaluate("document.querySelector('h1').textContent")) !== "Verified") found.push(`${place}: the form does not verify`);
    await check(look);
    await picture(look, "verified");
  }
  await elsewhere(`${pages.snapshot}/verify`);
  console.log(`${LOOKS.length * (Object.keys(pages).length + 4)} pages: screenshots in ${screenshots}`);
}

try {
  await main();
} catch (error) {
  found.push(`${place}: ${error.stack}`);
}
browser.removeAllListeners("exit");
browser.kill();
if (found.length > 0) {
  console.error(found.map((one) => `ui-check: ${one}`).join("\n"));
  process.exit(1);
}
