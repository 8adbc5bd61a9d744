"""How customers write, for the base model's corpus alone: phrases of each topic, of haste, of order numbers, and asides.

No line here is one of a ticket's, seen or unseen, nor nearly one. ``[a|b]``, ``{p}``, ``{o}`` and the other slots mean what
they mean in ``ft_assets/demo/phrases.py``; here an alternative may be empty.
"""

from __future__ import annotations

from typing import Final


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


TOPIC_PHRASES: Final[dict[str, tuple[str, ...]]] = {
    "delivery": _lines("""
        the mail carrier did not [come|ring] with my {p}
        my parcel with the {p} shows no movement
        how long does [shipping|delivery] of the {p} take
        the tracking number of the {p} does not work
        has the {p} been shipped [already|yet|at all]
        the box with the {p} went to my neighbour
        I am waiting for the {p} since {d}
        the courier lost the {p}
        the delivery date of the {p} changed again
        the {p} never came
        the package was empty, no {p} inside
        nothing has been delivered to {city}, where is the {p}
        the shipping company does not answer about the {p}
        still no sign of the {p}, [ordered|bought] on {d}
        can I get a tracking link for the {p}
        [could|can] you change the delivery address of the {p} to {city}
        my {p} is sitting in a depot in {city} since {d}
        the parcel locker did not open, so I could not pick up the {p}
        the pick-up code for the parcel with the {p} is missing
        the carrier returned the {p} to sender
        the {p} was left in the rain by the [driver|postman|delivery man]
        the parcel with the {p} was stolen from my [porch|doorstep|mailbox]
        a stranger signed for my {p}
        my neighbours know nothing about a parcel with the {p}
        which courier brings the {p}
        when will the {p} get here
        when can I expect my {p}
        what is the status of my shipment, I mean the {p}
        express shipping was promised but the {p} took {n} days
        I paid for next day delivery and the {p} is not here
        the postman left no note and I have no {p}
        the delivery slot for the {p} was missed on {d}
        please [deliver|bring] the {p} on {d} instead
        I will not be at home on {d}, can the courier bring the {p} later
        I moved to {city}, please send the {p} there
        the street on the label of the {p} parcel is wrong
        somebody else got my {p} and I got their parcel
        you shipped the {p} to {city} but I live elsewhere
        half of the shipment is here, the {p} is missing
        only one of two boxes arrived, the one with the {p} did not
        the truck with the {p} broke down, says the carrier
        my {p} has been in transit for {n} days
        the parcel is on its way for {n} days now and I want my {p}
        did my {p} leave the warehouse
        no shipping confirmation for the {p} so far
        I got no mail that the {p} was dispatched
        the dispatch of the {p} was announced for {d}
        the {p} is late
        delivery of the {p} failed [twice|again|on {d}]
        the courier could not find my house and took the {p} back to the depot
        the driver threw the parcel with the {p} over the fence
        the driver did not ring the bell and left with my {p}
        customs want papers for the {p}
        my {p} hangs in customs
        do you ship the {p} to {city}
        how much longer until the {p} is delivered
        has the carrier picked up my {p}
        your site says delivered, but there is no {p} at my door
        it says the {p} was handed over on {d}, not to me
        please find out where my {p} is
        please trace the parcel with the {p}
        I would like to know where the {p} is right now
        the estimated arrival of the {p} moved to {d}
        the arrival of my {p} is overdue
        the {p} should have come {n} days ago
        we are still expecting the {p}
        my order has not shipped, it is the {p}
        no {p} in the mail [today|again]
        the post office has no parcel for me, where did the {p} go
        the {p} is held at the post office in {city}
        the freight company dropped the {p} at the wrong door
        can the {p} be delivered to my office
        can I collect the {p} from the depot myself
        missing parcel: {p}
        late shipment, {p}
        tracking stopped, {p}
        the map shows the van in {city}, but nobody came with the {p}
        the tracking has shown the same place for {n} days, it is about the {p}
        was the {p} sent out on {d} as you said
        the wrong parcel came, not the {p}
        I received someone else's package instead of the {p}
        the delivery of the {p} was delayed [again|once more|without a word]
        why does the shipping of a {p} take {n} days
        it has been {n} days since the {p} was dispatched
        the courier wants a signature for the {p} but I am at work
        the package got soaked on the way, it holds the {p}
        my {p} disappeared in transit
        I am at home all day and no delivery of the {p}
    """),
    "refund": _lines("""
        I regret buying the {p}, take it back please
        how long does a refund for the {p} take
        I returned the {p}, where is the money
        you owe me the money for the {p} I returned
        the {p} is too big, can I give it back
        I would like to be refunded for the {p}
        the return form for the {p} does not open
        where do I print the return label for the {p}
        I want to cancel the {p} and get the money back
        my money for the {p} has not come back
        is it possible to return the {p} after {n} days
        refund the {p} to my card please
        I decided against the {p} and want to send it back
        what is your return policy for the {p}
        can I still return the {p} without the box
        how many days do I have to return the {p}
        to which address do I send the {p} back
        you got my return on {d}, the refund of the {p} is open
        the warehouse has my {p} back since {d}, no refund was paid
        you only paid back half of the {p}
        {a} of my refund for the {p} is missing
        I was promised my money back for the {p}
        please take back the {p} and reimburse me
        please reimburse me for the {p}
        the reimbursement for the {p} is not on my account
        my wife does not like the {p}, we want to give it back
        wrong colour, I am sending the {p} back
        it was a gift and I have one already, can the {p} be returned
        I bought two by mistake, one {p} goes back
        I ordered the {p} by accident, please cancel it
        cancel the {p} please, I found a better one
        please stop my order, I no longer want the {p}
        I changed my mind about the {p}
        I do not like the {p} and would rather have my money
        I am not happy with the {p} and want a refund
        not satisfied with the {p}, money back please
        the {p} did not meet my expectations, returning it
        the {p} is not as described, so I want to return it
        I want to withdraw from the purchase of the {p}
        I revoke my purchase of the {p}
        can I swap the {p} for my money
        I would take store credit for the {p} too
        I do not want a voucher, I want the money for the {p}
        you sent a voucher instead of a refund for the {p}
        the refund of the {p} went to an old card
        can the refund for the {p} go to another bank account
        please confirm that you received the {p} I sent back
        when will I be paid back for the {p}
        when is the refund for my {p} coming
        has my refund for the {p} been approved
        the status of my return of the {p} says pending since {d}
        my return request for the {p} got no answer
        your shop does not accept my return of the {p}
        why was my return of the {p} denied
        you say that the return window for the {p} is over
        I returned everything, the {p} too, and got nothing
        how can I give the {p} back
        how does returning a {p} work
        who pays for sending the {p} back
        do I have to pay for the return of the {p}
        may I bring the {p} back to the shop in {city}
        I need a form to return my {p}
        no return label was in the box of the {p}
        the return label you mailed for the {p} is blank
        please send a return slip for the {p}
        a courier should collect the {p} that I return
        I dropped the {p} off for return on {d}
        I mailed the {p} back {n} days ago and wait for my money
        it is {n} days since I gave back the {p}, pay me
        give me back what I paid for the {p}
        I want back the {a} that I paid for the {p}
        refund please: {p}
        return of a {p}
        money back for {p}
        return request, {p}, bought on {d}
        the {p} is too small for us, how can I get a refund
        I do not use the {p}, is a refund possible
        I never opened the {p} and would like to return it
        the {p} is unused and I want to hand it back
        my order of the {p} was cancelled, I still wait for the refund
        I cancelled the {p} on {d} but was not refunded
        after cancelling the {p} nobody sent my money
        can I send the {p} back for free
        take this {p} back, I have no use for it
        I demand a full refund for the {p}
        a partial refund for the {p} is not enough
        you deducted {a} from my refund for the {p}
        I got less money back than I paid for the {p}
        we sent back the {p} as agreed, please refund us
    """),
    "billing": _lines("""
        the amount on my statement for the {p} is {a}, why
        I see a strange fee of {a} for the {p}
        my bill for the {p} came twice
        the invoice of the {p} has the wrong name
        can I pay the {p} by invoice
        you took {a} from my bank for the {p}
        my credit card was charged for a {p} I never bought
        the voucher did not lower the price of the {p}
        the receipt for the {p} is missing the tax
        a payment of {a} for the {p} is unknown to me
        please correct the invoice for the {p}
        the price of the {p} on the bill is not the one in the shop
        I was billed for two {p} orders and made one
        you charged me too much for the {p}
        I have been overcharged by {a} for the {p}
        {a} was withdrawn for the {p} on {d}, what is that
        a second payment for the {p} left my bank account on {d}
        what is this charge of {a} for my {p}
        why was {a} debited for the {p}
        the direct debit for the {p} was made twice
        my bank statement lists the {p} two times
        the coupon for the {p} was ignored at checkout
        my promo code for the {p} did nothing
        the gift card was not counted when I paid the {p}
        the sale price of the {p} was lower than what you charged
        the shop said {a} but I paid more for the {p}
        there is a mistake in the bill of my {p}
        the total on the invoice for the {p} is off
        the invoice for the {p} lists things I did not buy
        the invoice for the {p} was made out to someone else
        please put our VAT number on the invoice for the {p}
        we need a tax invoice for the {p}
        our accounting needs a receipt for the {p}
        our accountant asks for the bill of the {p} from {d}
        I never got an invoice for my {p}
        could you mail me a copy of the invoice for the {p}
        where do I find the bill for the {p}
        the link to the receipt for the {p} is dead
        the pdf of the invoice for the {p} is blank
        I need a proof of payment for the {p}
        the billing address on the invoice for the {p} is old
        the VAT for the {p} was calculated wrong
        why is there tax on the {p}
        you charged me shipping costs of {a} for the {p}
        what are the extra costs of {a} on the bill for the {p}
        the monthly fee for the {p} went up to {a}
        I am still charged every month for the {p}
        the subscription for my {p} was renewed for {a}
        I did not agree to pay {a} a month for the {p}
        please stop charging my card for the {p}
        can I pay for the {p} in instalments
        the second instalment for the {p} was taken too early
        do you take bank transfer for the {p}
        I want to pay the {p} with another card
        please change the payment method for my {p}
        I paid the {p} by transfer on {d} and you say unpaid
        you sent a payment reminder for the {p} but I paid on {d}
        I got a reminder to pay {a} for the {p} that is paid already
        my payment for the {p} does not show up with you
        did you get my payment of {a} for the {p}
        the payment for the {p} failed but my bank sent the money
        my card is refused when I pay the {p}
        paying for the {p} at checkout does not go through
        the {p} was cheaper when I ordered, why {a}
        the {p} was on sale, the bill shows the full price
        the price of the {p} went up after I ordered
        I was charged in the wrong currency for the {p}
        I was charged {a} more than agreed for the {p}
        the amount for the {p} differs from the offer
        explain the {a} on my bill please, I only bought a {p}
        question about the bill of the {p}
        wrong invoice, {p}
        double charge for the {p}
        duplicate payment, {p}, {a}
        invoice missing for the {p}
        unexplained fee, {p}
        how much did I pay for the {p} in total
        what was the {a} for, I only have a {p}
        a late fee of {a} was added to the {p}
        my discount of {a} on the {p} is not on the invoice
        the student discount for the {p} was not taken off
        the deposit of {a} for the {p} was charged again
        the credit note for the {p} is wrong
        the {p} costs {a} on the invoice and less on the site
        the company name on the receipt for the {p} is spelled wrong
        please split the invoice for the {p} in two
        someone used my card to pay for a {p}
        I do not recognise the payment of {a} to you, I have a {p} from you
        the accounts department has a question on the bill for the {p}
    """),
    "hardware": _lines("""
        the {p} is completely dead
        something inside the {p} is loose
        the {p} smells burnt and gets hot
        the {p} does not charge any more
        my {p} fell and the case broke
        the screen of the {p} is broken
        the {p} turns off after {n} minutes, the battery is weak
        the {p} came damaged out of the box
        the plug of the {p} is bent
        my {p} is broken
        the cable of my {p} is loose
        the {p} rattles and smokes
        the power button of the {p} is stuck
        I press the button and nothing happens, the {p} stays dark
        the {p} gives no sign of life
        the {p} will not power up
        my {p} will not switch on any more
        the battery of the {p} lasts only {n} minutes
        the {p} is empty after an hour although it was fully charged
        the {p} is not charging, the cable is fine
        the charging port of the {p} is loose
        the charging dock of the {p} has no power
        the power supply of the {p} is broken
        the adapter of the {p} got so hot that it melted
        the {p} burns my hand, so hot
        the {p} overheats after {n} minutes
        sparks came out of the {p}
        the {p} smells of burnt plastic
        there is a burning smell when I plug in the {p}
        the fuse blows when I plug in the {p}
        the {p} hums and buzzes
        the {p} squeaks when it runs
        a strange rattling sound comes from inside the {p}
        the {p} got wet and does nothing now
        I spilled coffee on the {p}
        the {p} fell into water
        I dropped the {p} and the glass is shattered
        the glass of the {p} has a crack
        the display of the {p} shows lines and flickers
        the display of the {p} stays black
        the {p} came with a broken [case|corner|foot|lid]
        the {p} was already damaged when I unpacked it
        there is a dent in the {p}
        the housing of the {p} has come apart
        a screw fell out of the {p}
        a piece of the {p} broke off on {d}
        the hinge of the {p} snapped
        the lid of the {p} does not close
        the strap of the {p} tore
        the wheel of the {p} is jammed
        the motor of the {p} does not spin
        the brush of the {p} is worn out after {n} weeks
        the lens of the {p} is scratched
        the sensor of the {p} is defective
        the microphone of the {p} is dead
        no sound comes from the left side of the {p}
        the sound of the {p} crackles, the membrane is torn
        the antenna of the {p} broke off
        the light of the {p} does not come on any more
        the lamp on the {p} stays dark
        the {p} is faulty, can it be repaired
        my {p} needs a repair
        I need a spare part for the {p}
        where can I buy a new battery for the {p}
        is the damage to the {p} covered by the warranty
        warranty claim, the {p} is defective
        defective {p}
        broken {p}, please replace
        dead battery, {p}
        please send me a replacement, the {p} is broken
        how do I get the {p} repaired
        can you mend the {p}, the casing is split
        the {p} died after {n} days
        after {n} weeks the {p} gave up for good
        the {p} went up in smoke on {d}
        the {p} stopped in the middle of it and never came back on
        the {p} leaks
        there is water under the {p}
        the cover of the {p} is chipped
        the paint comes off the {p}
        the socket of the {p} is worn out
        the wire of the {p} is torn, I can see copper
        the connector of the {p} is bent and does not fit
        one of the keys on the {p} does not react
        the switch on the {p} broke
        the {p} vibrates and shakes by itself
        the fan of the {p} is loud and scrapes
        one foot of the {p} is missing, so it wobbles
        my dog chewed the cable of the {p}
    """),
    "software": _lines("""
        the {p} crashes when I open the app
        the update broke everything on the {p}
        the {p} app does not connect
        pairing the {p} with my phone fails
        the {p} freezes after the firmware update
        I see error {n} in the {p} app
        the new version on the {p} is slow and has bugs
        the {p} restarts by itself since the update
        the {p} app logs an error and closes
        bluetooth on the {p} drops since the update
        the {p} app is stuck on loading
        the {p} app crashes all the time
        the app for the {p} does not start any more
        the app for the {p} closes by itself
        the app shows a white page when I choose the {p}
        the app says no {p} found
        the app says that my {p} is offline
        my tablet cannot see the {p}
        my laptop does not recognise the {p}
        the {p} cannot be found over bluetooth
        the bluetooth link to the {p} breaks off every {n} minutes
        the {p} disconnects from the wifi again and again
        the {p} does not join my network
        the {p} forgets the wifi password after each restart
        I cannot connect the {p} to my computer
        I cannot get the {p} to pair
        the data of the {p} is not synced
        syncing the {p} stops at {n} percent
        the {p} stopped syncing on {d}
        my history in the {p} app is gone since the update
        all my settings on the {p} are gone
        the {p} went back to factory settings by itself
        the {p} does not save my settings
        the {p} shows the wrong time after the update
        the time zone in the {p} app is wrong
        the language of the {p} app changed by itself
        the {p} speaks the wrong language since the new firmware
        the menu of the {p} does not react after the upgrade
        the upgrade of the {p} will not finish
        the download of the update for the {p} stops
        there is no update for my {p} in the app
        how do I update the {p}
        how do I install the new firmware on the {p}
        which version should run on the {p}
        can I go back to the old version on the {p}
        please give me the old firmware of the {p} back
        installing the software for the {p} ends with an error
        the installer for the {p} stops with error {n}
        the setup program of the {p} hangs
        the setup of the {p} in the app does not finish
        I get an error message when I set up the {p}
        error {n} on the {p}
        what does error code {n} on the {p} mean
        the {p} reports an unknown error
        the {p} hangs on the start logo
        the {p} freezes [every {n} minutes|all the time|when I tap the menu]
        the {p} is frozen, I can only reset it
        the {p} became very slow with version {n}
        the {p} lags since the update on {d}
        the {p} keeps rebooting
        the {p} is in a reboot loop
        the {p} reboots when I change a setting
        I get no notifications from the {p} app
        alerts of the {p} come hours late on my mobile
        the alarm in the {p} app does not go off
        the timer in the app of the {p} ignores what I set
        the schedule in the {p} app gets lost
        the {p} app drains my phone since the update
        the {p} app does not run on my new tablet
        is the {p} app compatible with my system
        there is a bug in the {p} app
        I found a bug in the firmware of the {p}
        a feature of the {p} is gone after the update
        the button in the {p} app does nothing when I tap it
        the {p} widget shows old data
        voice commands on the {p} stopped working with the new release
        the screen of the {p} app stays on loading
        the {p} app says server not reachable
        the {p} does not work with the latest version
        after the patch the {p} no longer connects
        since version {n} nothing works on the {p}
        software problem with the {p}
        app crash, {p}
        update failed, {p}
        the map in the {p} app is wrong
        the pictures of the {p} do not load in the app
        the web page for the {p} settings does not load
        the driver for the {p} does not install on my laptop
        my computer says the driver of the {p} is out of date
        factory reset of the {p} does not help, the app still crashes
    """),
    "account": _lines("""
        my password for the {p} does not work
        I lost my login for the {p}
        the {p} portal does not let me sign in
        my {p} account was hacked
        I am locked out and cannot reach my {p}
        the email on my {p} account is wrong
        please unlock the account of my {p}
        how do I reset the password for the {p}
        I need a new login code for the {p}
        someone changed the password of my {p} account
        I want to close my account for the {p}
        I cannot sign in to see my {p}
        signing in to the {p} site fails
        the login page for the {p} rejects me
        logging in with my {p} account does not work
        your site does not accept my user name for the {p}
        I do not remember the password of my {p} account
        I have forgotten which email I used for the {p}
        the link to reset the password of the {p} account has expired
        no password mail came for the {p} account
        I asked for a new password for the {p} and got no mail
        the new password for the {p} is refused too
        please reset my password, I cannot use the {p}
        please send me a new password for the {p}
        the security code for the {p} login never comes
        the text message with the code for the {p} does not come
        the two factor code for the {p} is refused
        I have a new number and the code for the {p} goes to the old one
        the verification mail for the {p} is missing
        the confirmation link for my {p} account is dead
        I cannot confirm my email for the {p}
        I cannot create an account for my {p}
        how do I sign up with my {p}
        I want to register the {p} and the site says email taken
        registering my {p} fails, the form wants a user id
        the {p} is registered to somebody else
        the {p} still belongs to the account of the seller
        the previous owner has the {p} in his account
        I bought the {p} used, how do I add it to my profile
        please remove the {p} from my profile
        please take the {p} off my account
        the {p} is missing in my account
        my {p} is not listed under my profile
        please merge my two accounts, the {p} is in the old one
        I have two logins and the {p} is in the wrong one
        please move my {p} to the account of my [wife|brother|mother]
        can my [wife|brother|mother] use the {p} with an own login
        how do I add a second user to the {p}
        how do I invite somebody to my {p} account
        please delete my data, I do not own the {p} any more
        please erase my profile, the {p} is sold
        please close my account, the {p} is gone
        how can I delete my {p} profile
        please change my name in the {p} account
        I married and my name on the {p} account is old
        please update my phone number in the {p} account
        my address in the {p} profile is wrong and I cannot edit it
        I have a new email address, my {p} login has the old one
        I cannot change my password for the {p}
        the {p} account was blocked after {n} tries
        too many attempts, the {p} login is blocked
        my account was suspended and the {p} is of no use
        my user was disabled, so I cannot reach the {p}
        why is my {p} account disabled
        my access to the {p} portal is denied
        access denied when I sign in for my {p}
        I am signed out of the {p} every day
        I have to log in again every {n} minutes for my {p}
        the session for the {p} portal expires at once
        somebody signed in to my {p} account from {city}
        I see a strange device logged in to my {p} account
        a stranger has access to my {p}
        somebody stole my {p} login
        I got a mail about a login from {city}, is my {p} account safe
        I think somebody knows my password for the {p}
        how do I sign out my {p} everywhere
        my customer id for the {p} is not known
        the user name for my {p} is already taken
        what is my user name for the {p}
        which login do I need for the {p}
        the security question of my {p} account is wrong
        the pin of my {p} account is not accepted
        I lost the pin for my {p}
        login problem, {p}
        password forgotten, {p}
        account locked, {p}
        cannot log in, {p}
        please activate my user for the {p}
        my user for the {p} was never activated
        the portal does not know my {p} account
    """),
}
"""They make the base's notion of a topic wider than the training tickets."""

TOPIC_THINGS: Final[dict[str, tuple[str, ...]]] = {
    "delivery": _lines("""
        parcel
        package
        shipment
        shipping
        delivery
        courier
        carrier
        postman
        tracking
        tracking number
        delivery date
        delivery address
        arrival
        dispatch
        parcel locker
        pick-up point
        customs
        transport
        delay
        lost package
        missing parcel
        late delivery
    """),
    "refund": _lines("""
        refund
        return
        return label
        return slip
        return form
        returned item
        money back
        repayment
        reimbursement
        cancellation
        withdrawal from the purchase
        sending it back
        giving it back
        taking it back
        store credit
        return policy
        partial refund
        missing refund
        return window
        cancelled order
    """),
    "billing": _lines("""
        invoice
        bill
        charge
        double charge
        receipt
        payment
        payment method
        credit card
        direct debit
        bank transfer
        price
        discount
        coupon
        voucher code
        fee
        tax
        VAT
        instalment
        amount
        bank statement
        subscription fee
        payment reminder
        overcharge
    """),
    "hardware": _lines("""
        broken screen
        cracked glass
        battery
        charger
        charging cable
        plug
        power button
        broken button
        power supply
        casing
        damage
        defect
        repair
        spare part
        loose part
        noise
        overheating
        burnt smell
        water damage
        scratch
        dent
        motor
        warranty repair
    """),
    "software": _lines("""
        app
        update
        firmware
        firmware update
        new version
        software
        bug
        crash
        error code
        error message
        sync
        pairing
        bluetooth connection
        wifi connection
        settings
        notifications
        installation
        download
        reboot loop
        language setting
        setup in the app
        upgrade
    """),
    "account": _lines("""
        account
        login
        password
        password reset
        user name
        profile
        sign-in
        registration
        verification code
        login code
        security code
        email address on my account
        locked account
        hacked account
        access
        portal login
        user
        second user
        pin
        two factor code
        account deletion
    """),
}
"""Words that give a topic away; ``THING_CARRIERS`` puts them into a sentence."""

THING_CARRIERS: Final[tuple[str, ...]] = _lines("""
    I have a question about the {t} for my {p}
    question about the {t}, {p}
    there is a problem with the {t} of my {p}
    problem with {t}, {p}
    [trouble|trouble again] with the {t} of the {p}
    something is wrong with the {t} for the {p}
    {t} and my {p}, please help
    it is about the {t} of my {p}
    I am writing about the {t} for my {p}
    can someone look at the {t} of the {p}
    I need help with the {t} for the {p}
    I do not understand the {t} of my {p}
    the {t} of my {p} is a mess
    who can help me with the {t} for a {p}
    I am unhappy with the {t} of the {p}
    my {p}: {t}
    {t}, {p}
    hello, {t} issue with the {p}
    what about the {t} for my {p}
    any news on the {t} of the {p}
    we have an issue with {t} here, it is the {p}
""")

URGENCY_PHRASES: Final[dict[str, tuple[str, ...]]] = {
    "high": _lines("""
        I need it now.
        As soon as possible please.
        We are blocked, urgent help needed.
        It must be fixed today.
        Please answer fast, this is an emergency.
        Quick please!
        I cannot wait any longer.
        I need a reply [today|within the hour|right away].
        Please act [immediately|right now|straight away].
        This has to be solved [by tonight|by tomorrow|before {d}].
        Urgent!
        URGENT
        Very urgent please!
        Please treat this as urgent.
        Please handle this first.
        This is critical for us.
        It is really pressing.
        High priority please.
        We lose money every hour.
        Every hour counts.
        Every minute counts.
        Time is running out.
        I am running out of time.
        The deadline is [tomorrow|tonight|today].
        We have customers waiting right now.
        Our business stands still because of it.
        Our shop is closed until this is solved.
        My team cannot do anything until this works.
        I have to have it working by tomorrow.
        I leave in {n} hours and need it solved before.
        Please call me back at once.
        Please respond immediately.
        Do something, quickly!
        Help, quick!
        Hurry up please!
        I expect an answer today.
        Not next week, now!
        This must not wait.
        Do not let me wait.
        I need a fast solution.
        Drop everything else please.
        Please escalate this.
        Please put me at the front of the queue.
        It is a matter of hours.
        I depend on it, so please be quick.
        Please speed this up.
        Need this sorted out today.
        Can you do this right now?
        Can somebody help me immediately?
        How fast can you fix it? I need it today.
        We are in big trouble without it.
        Nothing works here until you help.
    """),
    "normal": (),
    "low": _lines("""
        No need to hurry.
        It is fine if this takes a while.
        Only a minor question.
        Not urgent for me.
        You can take a minute or a month.
        It can wait.
        Answer when you have time.
        No hurry.
        There is no rush.
        No pressure.
        No stress about it.
        Please do not hurry.
        I am not in a hurry.
        I am in no rush.
        I can wait.
        We can wait [a while|some weeks|until {d}].
        It can wait a few [days|weeks].
        Next week is [fine|okay|early enough].
        Any time next month works.
        Sometime this year is enough.
        A reply in a few weeks is okay.
        An answer next week would be fine.
        Get back to me when you can.
        Reply whenever it suits.
        Reply at your leisure.
        Look at it when things are quiet.
        When you get around to it.
        If you have a spare moment.
        Only if you have nothing better to do.
        Please do the other tickets first.
        Others surely need you more.
        Put it at the end of your list.
        Lowest priority.
        Low prio.
        This is not important.
        It does not matter much.
        It is nothing serious.
        It is a small thing really.
        Only a little thing.
        Only a small question.
        I am just curious.
        Just so you know.
        Just for your information.
        It does not bother me much.
        I can live with it for now.
        I get by without it.
        It is not a big deal.
        No big problem.
        Do not worry about the time.
        Time does not matter here.
        There is plenty of time.
        I have time.
    """),
}

ORDER_PHRASES: Final[tuple[str, ...]] = _lines("""
    My order is {o}.
    Order: {o}
    Order nr {o}
    Order number: {o}.
    order #{o}
    #{o}
    ({o})
    No. {o}
    Nr. {o}.
    The number of the order is {o}.
    The order number was {o}.
    I ordered it under {o}.
    I have order {o}.
    It was order {o}.
    This was order no. {o}.
    See {o}.
    Please look at {o}.
    Please check order {o}.
    Please look up order number {o}.
    Regarding order {o}.
    About order number {o}.
    Re order {o}.
    Concerning {o}.
    re: {o}
    Reference {o}.
    My reference is {o}.
    The reference for it is {o}.
    ref no {o}
    ref. {o}
    Your reference: {o}
    Order id: {o}.
    The id is {o}.
    ID {o}
    The purchase has the number {o}.
    My purchase number is {o}.
    Purchase {o}.
    The confirmation mail says {o}.
    The confirmation says order {o}.
    On the receipt it says {o}.
    It says {o} on the box.
    The number is {o}.
    The number I was given is {o}.
    They gave me the number {o}.
    In your system it is {o}.
    You have it as {o}.
    It is listed as {o}.
    {o} is the order.
    {o} is my order number.
    {o} is the number.
    Order placed: {o}.
    That was on order {o}.
    It belongs to order {o}.
    It came with order {o}.
""")

ASIDES: Final[tuple[str, ...]] = _lines("""
    I am from {city}.
    I have two of them.
    I got it on {d}.
    My neighbour has the same one.
    My [son|daughter|father|sister] uses it too.
    I like your products.
    I have read the manual.
    I looked at your website first.
    I talked to your colleague on {d}.
    It was a present.
    We are a small company.
    We are {n} people here.
    I am writing for my [father|sister|boss].
    It cost {a}.
    It happened on {d}.
    I hope you can help me.
    I hope you are well.
    Please help.
    Please let me know.
    Can you help me?
    What should I do?
    What can I do?
    I do not know what to do.
    I am disappointed.
    This is not what I expect of you.
    I had the same thing last year.
    I wrote on {d} too.
    My English is not so good.
    You can reach me by mail.
    I am at home after {n}.
    I bought it in {city}.
    It was on offer for {a}.
    I am new here.
    First time I write to you.
    I never had this before.
""")
"""True of many messages and of no topic or haste, so that not every unknown sentence says how soon an answer is wanted."""
