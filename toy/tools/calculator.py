"""The tool of reinforce_pp_tools.py's toy: a calculator that adds."""

import re


def calculate(text: str) -> str | None:
    """The answer to a response that ends in a call: `call 4 8 + 7 1 5 =` gives `7 6 3`. None without a call."""
    call = re.search(r"call ([0-9 ]*[0-9][0-9 +]*)=$", text)
    if not call:
        return None
    total = sum(int(number.replace(" ", "")) for number in call[1].split("+"))
    return " ".join(str(total))
