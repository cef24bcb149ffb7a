"""Texts that tokenizers disagree on: code, scripts, joined characters, whitespace, digits, control characters."""

from __future__ import annotations

TEXTS: tuple[str, ...] = (
    "",
    " ",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "It's what they've said; I'm sure he'll agree, won't he? SHE'LL. ’Tis",
    "  two leading spaces",
    "trailing spaces   ",
    "runs    of      spaces",
    "tabs\tand\t\ttabs\n\tand new lines\n\n\nthree of them\r\nand a carriage return\r",
    " \n \n  \n\t \n",
    "x = 1\ny  =  22\nz   =   333\n\n4. four\n\n\n5",
    "1234567890 12,345.67 1e-5 0x1F ½ ² Ⅷ ٣٤٥ 1\u00a0000",
    "def f(x: int) -> str:\n    '''doc'''\n    return f\"{x!r:>8}\" if x != 0 else '\\n'  # 100%\n",
    "#include <vector>\ntemplate<typename T>\nint main(){for(int i=0;i<10;++i){v[i]^=~i&0xFF;}return 0;}\n",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\u00e9"}}',
    "SELECT * FROM t WHERE a='b' AND c<>\"d\";--comment",
    "<html><body class='x'>&nbsp;</body></html>",
    "https://example.org/path?q=1&r=two#three user@example.org",
    "naïve café résumé Ångström Straße İstanbul ǅ ŉ ﬁ",
    "cafe\u0301 A\u030angstro\u0308m e\u0301\u0323\u0302 n\u0303",
    "日本語のテキスト。漢字かな交じり文、全角１２３！",
    "中文文本，包含标点。繁體字。한국어 텍스트 ㅎㅎㅎ",
    "Привет, как дела? Ελληνικά γράμματα ქართული",
    "مرحبا بالعالم ١٢٣ שלום עולם \u200fRTL\u200e",
    "हिन्दी में पाठ ไทยไม่มีช่องว่าง বাংলা தமிழ்",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ ♥︎ 🧑🏿‍🚀",
    "zero\u200bwidth\u200djoin\ufeff soft\u00adhyphen nb\u00a0space em\u2003space line\u2028sep",
    "control \x00 \x01 \x07 \x08 \x0b \x0c \x1b[31m \x7f \x85 chars",
    "\U0001d517\U0001d525\U0001d522 𝟙𝟚𝟛 \U0010ffff \ue000 \ufffd",
    "!!!??? ... --- ___ *** ((())) [[]] {{}} <<>> ~~~ ``` ''' \"\"\"",
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING_CASE mIxEd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "∀x∈ℝ: ∃y ≤ x² ⇒ ∑ᵢ aᵢ ≈ √π ± ∞ ≠ ½",
    "▁ lower block ▁▁ and <0x41> spelled out",
)


def with_special(*tokens: str) -> tuple[str, ...]:
    """Texts with special tokens in every kind of place."""
    first, second = tokens
    return (
        first,
        f"{first}{second}",
        f"{first}user\nHi there{second}\n{first}assistant\n",
        f"before {first} between {second} after",
        f"  {first}  {second}\n\n",
        f"{first[:-1]} broken {second[1:]}",
        f"x{first}y{second}z 1{first}2",
    )
