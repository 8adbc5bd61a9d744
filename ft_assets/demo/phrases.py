"""The words of the ticket task: what a customer may say, and which label each phrase stands for.

Three kinds of phrases, kept apart because the claim "unseen template" rests on it:

* ``SEEN``: in the training tickets, and in the text that the base model was pre-trained on;
* ``UNSEEN``: only in holdout tickets, in no training text of any kind;
* phrases that only the base model sees live in ``examples/demo``.

``[a|b]`` picks one of the alternatives, ``{p}`` is the product as the customer calls it, ``{o}`` the order number,
``{d}`` a day, ``{n}`` a small number, ``{a}`` an amount of money, ``{name}`` and ``{city}`` what they say.
"""

from __future__ import annotations

from typing import Final

PRODUCTS: Final[dict[str, tuple[str, ...]]] = {
    "router": ("Nimbus router", "router", "wifi router", "Nimbus R2", "Nimbus box"),
    "phone": ("AeroPhone", "phone", "AeroPhone 7", "smartphone", "mobile"),
    "earbuds": ("QuietBuds", "earbuds", "QuietBuds Pro", "ear buds", "wireless buds"),
    "camera": ("LumaCam", "camera", "doorbell camera", "LumaCam Mini", "security cam"),
    "vacuum": ("TerraVac", "robot vacuum", "vacuum", "TerraVac S", "hoover"),
    "printer": ("InkFlow", "printer", "InkFlow printer", "laser printer", "InkFlow 300"),
    "watch": ("PulseBand", "smart watch", "watch", "PulseBand 2", "fitness band"),
    "speaker": ("BoomBox", "speaker", "BoomBox speaker", "bluetooth speaker", "BoomBox Go"),
}
"""Label -> what customers call it. The first name is the brand: the one that a support agent would use."""

CATEGORIES: Final[tuple[str, ...]] = ("delivery", "refund", "billing", "hardware", "software", "account")
PRIORITIES: Final[tuple[str, ...]] = ("high", "normal", "low")

SEEN: Final[dict[str, tuple[str, ...]]] = {
    "delivery": (
        "my {p} has not arrived [yet|so far]",
        "the {p} was supposed to [be delivered|arrive] on {d} and it is still not here",
        "where is my {p}? the tracking has not moved since {d}",
        "the [parcel|package] with the {p} got lost [in the mail|on the way]",
        "the courier left the {p} at the wrong [address|house]",
        "I am still waiting for the delivery of my {p}",
        "tracking says the {p} was delivered but I [never received it|did not get it]",
        "the [shipment|delivery] of my {p} is late",
        "the [package|parcel] with my {p} is stuck in customs since {d}",
        "can you tell me when the {p} will be [shipped|sent]",
        "the driver never showed up with my {p}",
        "the {p} is {n} days late",
        "nobody [brought|delivered] the {p} on {d}",
        "my {p} was shipped to an old address",
        "the courier says the {p} is out for delivery since {d}",
        "I waited at home on {d} but no [parcel|courier] came with the {p}",
    ),
    "refund": (
        "I want my money back for the {p}",
        "please [refund|give me a refund for] the {p}",
        "I sent the {p} back on {d} and have no refund yet",
        "I would like to return the {p}",
        "how do I send the {p} back? I [changed my mind|do not need it]",
        "I returned the {p} {n} weeks ago and still no money back",
        "the {p} is not what I expected, I want to return it",
        "I need a return label for the {p}",
        "please cancel my order of the {p} and [refund me|return my money]",
        "you promised a refund for the {p} on {d}",
        "my return of the {p} was [refused|rejected]",
        "the refund for the {p} was only partial",
        "when do I get my money back for the {p}",
        "I do not want the {p} any more, how can I return it",
        "the {p} went back to you on {d}, please pay me back",
        "my refund for the {p} is [missing|not there]",
    ),
    "billing": (
        "I was charged twice for the {p}",
        "the invoice for the {p} shows the wrong [amount|price]",
        "my card was charged {a} for the {p} but the price was lower",
        "I need an invoice for the {p} with our company name",
        "there is an unknown charge of {a} on my card for the {p}",
        "the discount code was not applied to the {p}",
        "my payment for the {p} was declined but the money is gone",
        "you billed me {a} for the {p} again this month",
        "the tax on the bill for the {p} is wrong",
        "I cannot download the [receipt|invoice] of the {p}",
        "why do I pay a fee of {a} for the {p}",
        "the price on my bill for the {p} is too high",
        "the [bill|invoice] for the {p} has {a} too much on it",
        "my bank shows two payments for the {p}",
        "please send me the receipt for the {p}",
        "I paid {a} for the {p} and the invoice says something else",
    ),
    "hardware": (
        "the {p} arrived with a cracked [case|screen]",
        "the {p} does not turn on",
        "the battery of the {p} dies after {n} hours",
        "there is smoke coming from the {p}",
        "the {p} [stopped working|died] on {d}",
        "a button on the {p} is broken",
        "the {p} gets very hot and shuts down",
        "the {p} makes a loud [grinding|clicking] noise",
        "the charger of the {p} is broken",
        "one side of the {p} is dead",
        "the {p} fell apart after {n} weeks",
        "the cable of the {p} was damaged in the box",
        "the {p} has a big scratch and a loose part",
        "the light on the {p} is dead and it will not charge",
        "the plastic of the {p} [broke|cracked] on {d}",
        "water got into the {p} and it is dead",
    ),
    "software": (
        "since the last update the {p} keeps crashing",
        "the app does not find my {p}",
        "the firmware update of the {p} fails at {n} percent",
        "the {p} does not sync with the app",
        "the {p} shows error code {n} after the update",
        "the app of the {p} freezes on the start screen",
        "the {p} loses the bluetooth connection all the time",
        "the {p} reboots every {n} hours since the new version",
        "the settings of the {p} reset after every update",
        "the {p} will not pair with my laptop",
        "the new version of the {p} app is full of bugs",
        "notifications from the {p} do not show up in the app",
        "I cannot install the [new version|update] on the {p}",
        "the app [crashes|closes] when I connect the {p}",
        "the {p} hangs at {n} percent of the firmware update",
        "after the update the menu of the {p} is in the wrong language",
    ),
    "account": (
        "I cannot log in to register my {p}",
        "my account is locked and I cannot use the {p}",
        "the password reset mail for my {p} account never comes",
        "please change the email address on the account of my {p}",
        "please delete my account, I sold the {p}",
        "I forgot my password and cannot open the {p} portal",
        "someone else is logged in to my {p} account",
        "the login code for the {p} is not accepted",
        "how do I move the {p} to another user account",
        "my account says the {p} is not registered",
        "I cannot verify my email to activate the {p}",
        "my username for the {p} was hacked",
        "the portal for the {p} says my password is wrong",
        "I want to change the [username|name] on my {p} account",
        "the account of my {p} is blocked since {d}",
        "I get no login code for the {p} portal",
    ),
}

UNSEEN: Final[dict[str, tuple[str, ...]]] = {
    "delivery": (
        "I never received the {p} and the courier is silent",
        "the tracking page for the {p} is stuck",
        "the {p} parcel is late, it should have been here on {d}",
        "did the driver lose my {p}? nothing was delivered",
    ),
    "refund": (
        "I sent the {p} back and you still owe me a refund",
        "send me a return label, the {p} goes back",
        "I expected my money for the returned {p} by {d}",
        "can I return the {p} and be refunded",
    ),
    "billing": (
        "the bill for the {p} has the wrong price",
        "you charged my card {a} again for the {p}",
        "the receipt for the {p} shows an unknown fee",
        "two payments left my bank for one {p} invoice",
    ),
    "hardware": (
        "the {p} is broken, the case is cracked",
        "the battery of my {p} is dead",
        "my {p} stopped working, it does not even turn on",
        "a loose cable in the {p} gets hot and smells of smoke",
    ),
    "software": (
        "the update broke my {p}, the app crashes",
        "my {p} does not connect to the app since the new version",
        "error code {n} in the app when I pair the {p}",
        "the firmware of the {p} freezes and reboots",
    ),
    "account": (
        "the password for my {p} account is not accepted",
        "I am locked out of the account for the {p}",
        "I forgot the login for the {p} portal",
        "somebody hacked the email of my {p} account",
    ),
}

URGENCY_SEEN: Final[dict[str, tuple[str, ...]]] = {
    "high": (
        "This is [urgent|very urgent].",
        "I need this fixed [today|now]!",
        "Please hurry, it cannot wait.",
        "Our whole office is blocked by this.",
        "I need an answer within {n} hours.",
        "Top priority for us please.",
        "asap please!!",
        "I need it before tomorrow morning.",
        "Please help at once, we cannot work.",
        "It is an emergency.",
    ),
    "normal": (),
    "low": (
        "No rush [at all|from my side].",
        "Whenever you have time.",
        "It is not urgent.",
        "Take your time.",
        "This can wait until next month.",
        "Just a minor thing.",
        "Low priority, just letting you know.",
        "Answer whenever it suits you.",
        "There is no hurry with this.",
        "Some time next month is fine.",
    ),
}

URGENCY_UNSEEN: Final[dict[str, tuple[str, ...]]] = {
    "high": ("Urgent, I need an answer today.", "Please fix it asap, we are blocked.", "Hurry please, this is an emergency!"),
    "normal": (),
    "low": ("No hurry, it can wait.", "Just a minor thing, whenever you have a minute.", "Not urgent, take the time you need."),
}

ORDER_SEEN: Final[tuple[str, ...]] = (
    "My order number is {o}.",
    "Order {o}.",
    "order no. {o}",
    "(order #{o})",
    "Ref: {o}",
    "The order is #{o}.",
    "It is about order {o}.",
    "Order ID {o}",
    "reference number {o}.",
    "You find it under order {o}.",
)
ORDER_UNSEEN: Final[tuple[str, ...]] = ("This is for order number {o}.", "Order ref #{o}.", "See order {o} please.")

FILLERS: Final[tuple[str, ...]] = (
    "I bought it on {d}.",
    "I live in {city}.",
    "My [wife|brother|mother] gave it to me.",
    "I have tried everything.",
    "I already wrote to you {n} times.",
    "It is the second time this happens.",
    "I use it for work.",
    "I called your hotline on {d}.",
    "You can call me after {n} pm.",
    "I paid {a} for it.",
    "I am a customer for {n} years.",
    "The shop in {city} could not help.",
)
"""True of many tickets and of no label: numbers, days and places that the model has to leave out."""

GREETINGS: Final[tuple[str, ...]] = (
    "Hi,", "Hello,", "Hi there,", "Hello support team,", "Dear support,", "Good morning,", "Hey,", "Good evening,", "", "", "",
)  # fmt: skip
CLOSINGS: Final[tuple[str, ...]] = (
    "Thanks, {name}", "Regards, {name}", "Best, {name}", "Kind regards {name}", "{name}", "Cheers, {name}", "", "", "",
)  # fmt: skip

NAMES: Final[tuple[str, ...]] = (
    "Ana",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Femi",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Pavel",
    "Quinn",
    "Rosa",
    "Samir",
    "Tara",
    "Uma",
    "Victor",
    "Wendy",
    "Xiao",
    "Yusuf",
    "Zoe",
    "Anders",
    "Bianca",
    "Chen",
    "Dora",
    "Emil",
    "Farah",
)
CITIES: Final[tuple[str, ...]] = (
    "Lima",
    "Oslo",
    "Paris",
    "Berlin",
    "Madrid",
    "Porto",
    "Cairo",
    "Delhi",
    "Tokyo",
    "Boston",
    "Dallas",
    "Quito",
    "Turin",
    "Lyon",
    "Vienna",
    "Prague",
    "Athens",
    "Dublin",
)
MONTHS: Final[tuple[str, ...]] = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
DAYS: Final[tuple[str, ...]] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
