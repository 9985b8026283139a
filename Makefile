.DEFAULT_GOAL := help
STEPS := build vet format test race invariants lint fuzz

.PHONY: help check golden clean $(STEPS)

help:
	@echo 'make check     all that CI runs'
	@echo 'make STEP      one step of it: $(STEPS)'
	@echo 'make golden    write the golden files of tests anew; look at the diff'
	@echo 'make clean     remove built tools'

check:
	.ci/run

$(STEPS):
	.ci/run $@

golden:
	@for pkg in $$(git grep -lE 'flag.Bool\("rewrite"' -- '*_test.go' | xargs -n1 dirname | sort -u); do \
		go test ./$$pkg -rewrite || exit 1; done

clean:
	rm -rf tools/bin
