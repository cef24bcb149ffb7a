// requires: @anthropic-ai/claude-code
import { MODEL, URL, check, report, told } from "./feature.mjs";

// Its own instructions and tools have more tokens than the model's context.
const options = ["-p", "Say hello.", "--output-format", "json", "--max-turns", "1", "--system-prompt", "Be short.", "--tools", "Read"];
const variables = {
  ANTHROPIC_BASE_URL: URL,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: MODEL,
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: "50",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

await report({
  async messages() {
    const found = JSON.parse(told("claude", options, () => variables));
    // A small model may talk on to the limit, which is an error to Claude Code.
    check(!found.is_error || found.result.includes("output token maximum"));
    check(found.usage.output_tokens > 0);
  },
});
