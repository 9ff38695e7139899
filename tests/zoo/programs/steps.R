# R: the state of its random numbers, a matrix, an open file and a compiled function.
set.seed(7)
say <- function(...) { cat(..., "\n", sep = ""); flush(stdout()) }
dir.create("/srv/zoo", showWarnings = FALSE, recursive = TRUE)
file <- file("/srv/zoo/r", "w+")
f <- compiler::cmpfun(function(x) sum(x * x))
drawn <- numeric(0)
say("ready")
n <- 0
while (!file.exists("/gate/end")) {
  n <- n + 1
  drawn <- c(drawn, rnorm(10))
  if (n %% 10 == 0) {
    kept <- .Random.seed
    set.seed(7)
    again <- rnorm(10 * n)
    stopifnot(identical(again, drawn))
    .Random.seed <- kept
  }
  stopifnot(f(1:100) == 338350)
  stopifnot(abs(det(solve(matrix(c(2, 1, 1, 3), 2)))- 0.2) < 1e-9)
  writeLines(paste("line", n), file)
  flush(file)
  stopifnot(length(readLines("/srv/zoo/r")) == n)
  Sys.sleep(0.1)
  say("ok ", n)
}
say("done")
