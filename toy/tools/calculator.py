"""The tool of reinforce_pp_tools.py's toy: a calculator that adds."""

import re


def calculate(text: str) -> str | None:
    """The answer to a response that ends in a call: `call 4 8 + 7 1 5 =` gives `7 6 3`. None without a call."""
    call = re.search(r"call ([0-9 +]+)=$", text)
    numbers = call[1].replace(" ", "").split("+") if call else [""]
    if "" in numbers:  # no call, or a plus without a number beside it
        return None
    return " ".join(str(sum(map(int, numbers))))
