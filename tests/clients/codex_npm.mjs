// requires: @openai/codex
import { MODEL, URL, check, report, told } from "./feature.mjs";

// Its own instructions have more tokens than the model's context.
const provider = `{name="wager", base_url="${URL}/v1", wire_api="responses"}`;
const settings = [`model=${MODEL}`, "model_provider=wager", `model_providers.wager=${provider}`, "base_instructions=Be short."];
const options = ["exec", "--skip-git-repo-check", "--json", "--sandbox", "read-only"];

await report({
  async responses() {
    const all = [...options, ...settings.flatMap((setting) => ["-c", setting]), "Say hello."];
    const lines = told("codex", all, (home) => ({ CODEX_HOME: home })).trim().split("\n");
    const events = lines.map((line) => JSON.parse(line));
    check(events.at(-1).type === "turn.completed" && events.at(-1).usage.output_tokens > 0);
    check(events.some((event) => event.item?.type === "agent_message" && event.item.text));
  },
});
