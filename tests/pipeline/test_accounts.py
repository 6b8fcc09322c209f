from asyncrl.pipeline.accounts import TokenAccounts


def test_every_token_has_one_fate():
    accounts = TokenAccounts()
    accounts.train(70)
    accounts.drop("stale", 20)
    accounts.drop("environment_failed", 0)
    balance = accounts.balance(generated=100, in_flight=10)
    assert balance.difference == 0
    assert balance.as_record() == {"generated": 100, "trained": 70, "dropped": {"stale": 20}, "in_flight": 10}


def test_a_lost_and_a_doubled_token_both_show():
    accounts = TokenAccounts(trained=5)
    assert accounts.balance(generated=6, in_flight=0).difference == 1
    assert accounts.balance(generated=4, in_flight=0).difference == -1
