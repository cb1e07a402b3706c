"""The tool of reinforce_pp_tools.py's toy: a calculator that adds."""


def calculate(text: str) -> str | None:
    """The answer to a response that ends in a call: `call 4 8 + 7 1 5 =` gives `7 6 3`. None without a call."""
    _, call, numbers = text.rpartition("call")
    if not call or not text.endswith("="):
        return None
    total = sum(int(number.replace(" ", "")) for number in numbers.removesuffix("=").split("+"))
    return " ".join(str(total))
