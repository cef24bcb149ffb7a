// The same as feature.py, for clients in JavaScript: `node SCRIPT URL MODEL`.
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const [URL, MODEL] = process.argv.slice(2);
export const KEY = "no-key-is-needed";
export const QUESTION = "What is the weather in Oslo?";
export const CITY = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

export function check(condition) {
  if (!condition) throw new Error("the answer is another than expected");
}

export async function report(features) {
  const found = {};
  for (const [name, feature] of Object.entries(features)) {
    try {
      await feature();
      found[name] = "yes";
    } catch (error) {
      console.error(error);
      found[name] = `no: ${error.name}: ${String(error.message).slice(0, 200)}`;
    }
  }
  console.log(JSON.stringify(found));
}

// What an agent prints. It has a home of its own, and a proxy that is not there for everything but the server.
export function told(program, options, variables) {
  const home = mkdtempSync(join(tmpdir(), "agent-"));
  const proxy = "http://127.0.0.1:9";
  const env = { PATH: process.env.PATH, HOME: home, HTTPS_PROXY: proxy, HTTP_PROXY: proxy, NO_PROXY: "127.0.0.1", ...variables(home) };
  const command = join(import.meta.dirname, "node_modules", ".bin", program);
  const stdio = ["ignore", "pipe", "pipe"];
  const found = spawnSync(command, options, { env, cwd: home, stdio, encoding: "utf8", timeout: 600_000 });
  if (!found.stdout) throw new Error(`${program}: ${found.stderr.slice(-1500)}`);
  return found.stdout;
}
