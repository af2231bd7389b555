// Which of several processes this one is, by what each launcher sets. Values are those that were
// seen in real processes, where a launcher could be run.
#include "tools/launch/launcher.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using Choice = LauncherChoice;

// `more` counts where both have a name.
Environment with(Environment more, const Environment& base) {
  more.insert(base.begin(), base.end());
  return more;
}
Environment without(const std::string& name, Environment base) {
  EXPECT_EQ(base.erase(name), 1u) << name;
  return base;
}

// The last of two processes on the second of two hosts.
const Environment kTorchrun = {{"TORCHELASTIC_RUN_ID", "none"},
                               {"TORCHELASTIC_RESTART_COUNT", "1"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "2"},
                               {"GROUP_RANK", "1"},
                               {"GROUP_WORLD_SIZE", "2"},
                               {"ROLE_RANK", "3"},
                               {"ROLE_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "h1"},
                               {"MASTER_PORT", "29500"},
                               {"OMP_NUM_THREADS", "1"},
                               {"USER", "alice"}};
// What sbatch gives its script, and salloc its shell.
const Environment kSlurmScript = {{"SLURM_JOB_ID", "4711"},    {"SLURM_PROCID", "0"},
                                  {"SLURM_NTASKS", "4"},       {"SLURM_LOCALID", "0"},
                                  {"SLURM_NODEID", "0"},       {"SLURM_NNODES", "2"},
                                  {"SLURM_NODELIST", "h[1-2]"}};
const Environment kSrun = with({{"SLURM_STEP_ID", "0"},
                                {"SLURM_PROCID", "2"},
                                {"SLURM_LOCALID", "0"},
                                {"SLURM_NODEID", "1"},
                                {"SLURM_STEP_NUM_TASKS", "4"},
                                {"SLURM_STEP_NUM_NODES", "2"},
                                {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                                {"SLURM_STEP_NODELIST", "h[1-2]"}},
                               kSlurmScript);
const Environment kMpirun = {{"OMPI_COMM_WORLD_RANK", "1"},
                             {"OMPI_COMM_WORLD_SIZE", "2"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                             {"OMPI_COMM_WORLD_NODE_RANK", "1"},
                             {"PMIX_NAMESPACE", "2874540033"},
                             {"PMIX_RANK", "1"},
                             {"PMIX_SERVER_URI2", "2874540033.0;tcp4://127.0.0.1:1"}};
const Environment kHydra = {{"PMI_FD", "7"},
                            {"PMI_RANK", "5"},
                            {"PMI_SIZE", "8"},
                            {"MPI_LOCALRANKID", "1"},
                            {"MPI_LOCALNRANKS", "4"}};
const Environment kMvapich = {{"MV2_COMM_WORLD_RANK", "2"},
                              {"MV2_COMM_WORLD_SIZE", "4"},
                              {"MV2_COMM_WORLD_LOCAL_RANK", "0"},
                              {"MV2_COMM_WORLD_LOCAL_SIZE", "2"}};
const Environment kByHand = {
    {"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.77.0.1"}, {"MASTER_PORT", "29500"}};
const Environment kPyTorchJob = {{"RANK", "1"},
                                 {"WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "job-master-0"},
                                 {"PET_NNODES", "2"},
                                 {"PET_NODE_RANK", "1"},
                                 {"PET_NPROC_PER_NODE", "auto"},
                                 {"MASTER_PORT", "23456"},
                                 {"PET_MASTER_ADDR", "job-master-0"}};

const Launch kOfTorchrun{.by = Choice::kTorchrun,
                         .process = 3,
                         .num_processes = 4,
                         .local_process = 1,
                         .num_local_processes = 2,
                         .host = 1,
                         .num_hosts = 2,
                         .address = "tcp:h1:21114+15",
                         .job = "torchrun:none:29500:alice"};
const Launch kOfSrun{.by = Choice::kSlurm,
                     .process = 2,
                     .num_processes = 4,
                     .local_process = 0,
                     .num_local_processes = 2,
                     .host = 1,
                     .num_hosts = 2,
                     .address = "tcp:h1:27355+15",
                     .job = "slurm:4711.0"};
const Launch kOfMpirun{.by = Choice::kOpenMpi,
                       .process = 1,
                       .num_processes = 2,
                       .local_process = 1,
                       .num_local_processes = 2,
                       .address = "tcp:127.0.0.1:22757+15",
                       .job = "openmpi:2874540033",
                       .has_mpi = true};
const Launch kOfHydra{.by = Choice::kHydra,
                      .process = 5,
                      .num_processes = 8,
                      .local_process = 1,
                      .num_local_processes = 4,
                      .host = std::nullopt,
                      .num_hosts = std::nullopt,
                      .has_mpi = true};
const Launch kOfMvapich{.by = Choice::kHydra,
                        .process = 2,
                        .num_processes = 4,
                        .local_process = 0,
                        .num_local_processes = 2,
                        .host = std::nullopt,
                        .num_hosts = std::nullopt,
                        .has_mpi = true};
const Launch kOfHand{.by = Choice::kEnv,
                     .process = 2,
                     .num_processes = 4,
                     .host = 2,
                     .num_hosts = 4,
                     .address = "tcp:10.77.0.1:29500",
                     .job = "env:29500:"};

// `launch`, with some fields changed.
template <class F>
Launch but(Launch launch, F&& change) {
  change(launch);
  return launch;
}
Launch alone(std::string note = "") {
  Launch launch;
  if (!note.empty()) launch.notes.push_back(std::move(note));
  return launch;
}

struct Row {
  const char* what;
  Environment environment;
  Launch launch;
};

void expect_launch(const Row& row, Choice choice) {
  SCOPED_TRACE(std::string(row.what) + ", " + std::string(name_of(choice)));
  const Launch got = find_launch(row.environment, choice), &expected = row.launch;
  EXPECT_EQ(name_of(got.by), name_of(expected.by));
  EXPECT_EQ(got.str(), expected.str());
  EXPECT_EQ(got.address, expected.address);
  EXPECT_EQ(got.job, expected.job);
  EXPECT_EQ(got.has_mpi, expected.has_mpi);
  EXPECT_EQ(got.has_pmi, expected.has_pmi);
  EXPECT_EQ(got.notes, expected.notes);
  EXPECT_TRUE(got == expected);
}

TEST(Launcher, EachSaysWhichProcessThisIs) {
  const std::vector<Row> rows = {
      {"nobody", {{"HOME", "/"}, {"USER", "alice"}, {"RANK", ""}}, alone()},
      {"torchrun", kTorchrun, kOfTorchrun},
      {"torchrun on one host, whatever it is called",
       with({{"RANK", "1"},
             {"WORLD_SIZE", "2"},
             {"GROUP_RANK", "0"},
             {"GROUP_WORLD_SIZE", "1"},
             {"MASTER_ADDR", "h1.example.com"}},
            kTorchrun),
       but(kOfTorchrun,
           [](Launch& launch) {
             launch.process = 1;
             launch.num_processes = 2;
             launch.host = 0;
             launch.num_hosts = 1;
             launch.address = "tcp:127.0.0.1:21114+15";
           })},
      {"torchrun of one process",
       with({{"RANK", "0"},
             {"WORLD_SIZE", "1"},
             {"LOCAL_RANK", "0"},
             {"LOCAL_WORLD_SIZE", "1"},
             {"GROUP_RANK", "0"},
             {"GROUP_WORLD_SIZE", "1"}},
            kTorchrun),
       {.by = Choice::kTorchrun}},
      {"srun", with({{"SLURM_MPI_TYPE", "none"}}, kSrun), kOfSrun},
      {"srun --mpi=pmix",
       with({{"SLURM_MPI_TYPE", "pmix"},
             {"PMIX_RANK", "2"},
             {"PMIX_NAMESPACE", "slurm.pmix.4711.0"}},
            kSrun),
       but(kOfSrun, [](Launch& launch) { launch.has_mpi = true; })},
      {"srun --mpi=pmi2",
       with({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"PMI_FD", "7"}, {"PMI_JOBID", "4711.0"}},
            kSrun),
       but(kOfSrun, [](Launch& launch) { launch.has_mpi = launch.has_pmi = true; })},
      {"srun --mpi=pmix that sets PMI_RANK as well",
       with({{"PMIX_RANK", "2"}, {"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}, kSrun),
       but(kOfSrun, [](Launch& launch) { launch.has_mpi = true; })},
      {"srun of unequal numbers of tasks on three hosts",
       with({{"SLURM_PROCID", "5"},
             {"SLURM_LOCALID", "1"},
             {"SLURM_NODEID", "2"},
             {"SLURM_STEP_NUM_TASKS", "6"},
             {"SLURM_STEP_NUM_NODES", "3"},
             {"SLURM_STEP_TASKS_PER_NODE", "1,3,2"},
             {"SLURM_STEP_NODELIST", "rack[1,3]-[03-04],rack7"}},
            kSrun),
       but(kOfSrun,
           [](Launch& launch) {
             launch.process = 5;
             launch.num_processes = 6;
             launch.local_process = 1;
             launch.host = 2;
             launch.num_hosts = 3;
             launch.address = "tcp:rack1-03:27355+15";
           })},
      {"srun of one host of two, and its second step",
       with({{"SLURM_STEP_ID", "1"},
             {"SLURM_PROCID", "1"},
             {"SLURM_LOCALID", "1"},
             {"SLURM_NODEID", "0"},
             {"SLURM_STEP_NUM_TASKS", "2"},
             {"SLURM_STEP_NUM_NODES", "1"},
             {"SLURM_STEP_TASKS_PER_NODE", "2"},
             {"SLURM_STEP_NODELIST", "h2"}},
            kSrun),
       but(kOfSrun,
           [](Launch& launch) {
             launch.process = 1;
             launch.num_processes = 2;
             launch.local_process = 1;
             launch.host = 0;
             launch.num_hosts = 1;
             launch.address = "tcp:127.0.0.1:27144+15";
             launch.job = "slurm:4711.1";
           })},
      {"srun that puts process 0 on the second host", with({{"SLURM_PROCID", "0"}}, kSrun),
       but(kOfSrun,
           [](Launch& launch) {
             launch.process = 0;
             launch.notes = {
                 "process 0 is not on the first host of "
                 "SLURM_STEP_NODELIST=h[1-2], where the "
                 "others look for it: give its address"};
           })},
      {"the script of sbatch", kSlurmScript,
       alone("in a Slurm job (SLURM_JOB_ID=4711), but not started by srun: one process")},
      {"the shell of salloc, which is a step", with({{"SLURM_STEP_ID", "4294967290"}}, kSrun),
       alone("in a Slurm job (SLURM_JOB_ID=4711), but not started by srun: one process")},
      {"mpirun of Open MPI", kMpirun, kOfMpirun},
      {"mpirun of Open MPI on several hosts", with({{"OMPI_COMM_WORLD_SIZE", "4"}}, kMpirun),
       but(kOfMpirun,
           [](Launch& launch) {
             launch.num_processes = 4;
             launch.host = launch.num_hosts = std::nullopt;
             launch.address = "";
           })},
      {"mpirun of MPICH and Intel MPI", kHydra, kOfHydra},
      {"mpirun_rsh of MVAPICH", with({{"PMI_ID", "2"}}, kMvapich), kOfMvapich},
      {"MPIJob: mpirun in its pod", with({{"K_MPI_JOB_ROLE", "launcher"}}, kMpirun), kOfMpirun},
      {"MPIJob: the pod without mpirun",
       {{"K_MPI_JOB_ROLE", "launcher"}, {"OMPI_MCA_orte_default_hostfile", "/etc/mpi/hostfile"}},
       alone("in an MPIJob (K_MPI_JOB_ROLE=launcher), but not started by mpirun: one process")},
      {"by hand", kByHand, kOfHand},
      {"by hand, several on a host",
       with({{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}}, kByHand),
       but(kOfHand,
           [](Launch& launch) {
             launch.num_local_processes = 2;
             launch.host = launch.num_hosts = std::nullopt;
           })},
      {"by hand, the only one", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}, {.by = Choice::kEnv}},
      {"PyTorchJob of one process a pod", kPyTorchJob,
       but(kOfHand,
           [](Launch& launch) {
             launch.process = launch.host.emplace(1);
             launch.num_processes = launch.num_hosts.emplace(2);
             launch.address = "tcp:job-master-0:23456";
             launch.job = "env:23456:";
           })},
      {"TrainJob without torchrun",
       {{"PET_NNODES", "2"}, {"PET_MASTER_PORT", "29500"}},
       alone("in a PyTorchJob (PET_NNODES=2), but not started by torchrun: one process")},
      // One that started another.
      {"mpirun in a Slurm job: variables of its daemon",
       with(kMpirun, with({{"SLURM_PROCID", "0"},
                           {"SLURM_STEP_NUM_TASKS", "1"},
                           {"SLURM_STEP_TASKS_PER_NODE", "1"}},
                          kSrun)),
       kOfMpirun},
      {"hydra in a Slurm job", with(kHydra, kSrun), kOfHydra},
      {"MVAPICH in a Slurm job", with(kMvapich, kSlurmScript), kOfMvapich},
      {"torchrun by srun", with(kTorchrun, kSrun), kOfTorchrun},
      {"torchrun by mpirun", with(kTorchrun, kMpirun), kOfTorchrun},
      {"torchrun in a PyTorchJob", with(kTorchrun, kPyTorchJob), kOfTorchrun},
      {"srun, whose script set RANK", with(kSrun, kByHand), kOfSrun},
      {"srun by mpirun of something else: MPI's rank is not this step's",
       with({{"PMIX_RANK", "0"}}, kSrun), kOfSrun},
  };
  for (const Row& row : rows) expect_launch(row, Choice::kAuto);
}

TEST(Launcher, TheOneThatIsAskedForCounts) {
  const Environment all = with(kTorchrun, with(kMpirun, with(kHydra, kSrun)));
  expect_launch({"all", all, kOfTorchrun}, Choice::kTorchrun);
  expect_launch({"all", all, kOfMpirun}, Choice::kOpenMpi);
  expect_launch({"all", all, kOfHydra}, Choice::kHydra);
  expect_launch({"all", all, alone()}, Choice::kThreads);
  expect_launch({"script", kSlurmScript, alone()}, Choice::kThreads);
  expect_launch({"srun", kSrun, kOfSrun}, Choice::kSlurm);
  expect_launch({"MVAPICH", kMvapich, kOfMvapich}, Choice::kHydra);
  expect_launch({"by hand", with(kByHand, kSrun), kOfHand}, Choice::kEnv);
}

std::string error(const Environment& environment, Choice choice = Choice::kAuto) {
  return error_of<engine::InvalidArgument>([&] { find_launch(environment, choice); });
}

TEST(Launcher, OneThatIsAskedForAndHasNotStartedThisIsAnError) {
  EXPECT_EQ(error({}, Choice::kTorchrun),
            "[launcher] expected torchrun to have started this process, as in `torchrun "
            "--no-python --nproc-per-node=4 PROGRAM`, got no TORCHELASTIC_RUN_ID "
            "(parallel.launcher)");
  EXPECT_EQ(error(kSlurmScript, Choice::kSlurm),
            "[launcher] expected slurm to have started this process, as in `srun "
            "--ntasks-per-node=4 PROGRAM`, got no SLURM_STEP_ID: in a Slurm job "
            "(SLURM_JOB_ID=4711), but not started by srun: one process (parallel.launcher)");
  EXPECT_EQ(error(kHydra, Choice::kOpenMpi),
            "[launcher] expected openmpi to have started this process, as in `mpirun -n 4 "
            "PROGRAM`, got no OMPI_COMM_WORLD_RANK (parallel.launcher)");
  EXPECT_EQ(error(kMpirun, Choice::kHydra),
            "[launcher] expected hydra to have started this process, as in `mpiexec -n 4 "
            "PROGRAM`, got no MPI_LOCALRANKID (parallel.launcher)");
  EXPECT_EQ(error(kSrun, Choice::kEnv),
            "[launcher] expected env to have started this process, as in `RANK=0 WORLD_SIZE=4 "
            "MASTER_ADDR=HOST MASTER_PORT=29500 PROGRAM`, got no RANK: in a Slurm job "
            "(SLURM_JOB_ID=4711), but not started by srun: one process (parallel.launcher)");
}

struct Wrong {
  Environment environment;
  std::string error;  // between "[launcher] expected " and the launcher
};
void expect_errors(const std::string& launcher, const std::vector<Wrong>& wrongs) {
  for (const Wrong& wrong : wrongs) {
    EXPECT_EQ(error(wrong.environment),
              "[launcher] expected " + wrong.error + " (" + launcher + ")");
  }
}

TEST(Launcher, NumbersThatContradictEachOtherAreErrors) {
  expect_errors(
      "torchrun",
      {{with({{"RANK", "4"}}, kTorchrun), "RANK below WORLD_SIZE, got RANK=4, WORLD_SIZE=4"},
       {with({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, kTorchrun),
        "RANK below WORLD_SIZE, got RANK=0, WORLD_SIZE=0"},
       {with({{"LOCAL_RANK", "2"}}, kTorchrun),
        "LOCAL_RANK below LOCAL_WORLD_SIZE, got LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"},
       {with({{"LOCAL_WORLD_SIZE", "5"}}, kTorchrun),
        "LOCAL_WORLD_SIZE of at most WORLD_SIZE, got LOCAL_WORLD_SIZE=5, WORLD_SIZE=4"},
       {with({{"GROUP_RANK", "2"}}, kTorchrun),
        "GROUP_RANK below GROUP_WORLD_SIZE, got GROUP_RANK=2, GROUP_WORLD_SIZE=2"},
       {with({{"GROUP_WORLD_SIZE", "5"}}, kTorchrun),
        "GROUP_WORLD_SIZE of at most WORLD_SIZE, got GROUP_WORLD_SIZE=5, WORLD_SIZE=4"},
       {with({{"GROUP_RANK", "0"}, {"GROUP_WORLD_SIZE", "1"}}, kTorchrun),
        "LOCAL_WORLD_SIZE equal to WORLD_SIZE on one host, got LOCAL_WORLD_SIZE=2, WORLD_SIZE=4, "
        "GROUP_WORLD_SIZE=1"}});
  expect_errors("openmpi", {{with({{"OMPI_COMM_WORLD_RANK", "2"}}, kMpirun),
                             "OMPI_COMM_WORLD_RANK below OMPI_COMM_WORLD_SIZE, got "
                             "OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=2"}});
  expect_errors("hydra", {{with({{"MPI_LOCALRANKID", "4"}}, kHydra),
                           "MPI_LOCALRANKID below MPI_LOCALNRANKS, got MPI_LOCALRANKID=4, "
                           "MPI_LOCALNRANKS=4"},
                          {with({{"MV2_COMM_WORLD_RANK", "4"}}, kMvapich),
                           "MV2_COMM_WORLD_RANK below MV2_COMM_WORLD_SIZE, got "
                           "MV2_COMM_WORLD_RANK=4, MV2_COMM_WORLD_SIZE=4"}});
  const auto lists = [](const std::string& tasks, const std::string& hosts) {
    return "SLURM_STEP_TASKS_PER_NODE of SLURM_STEP_NUM_TASKS and SLURM_STEP_NUM_NODES, got "
           "SLURM_STEP_TASKS_PER_NODE=" +
           tasks + ", SLURM_STEP_NUM_TASKS=4, SLURM_STEP_NUM_NODES=" + hosts;
  };
  expect_errors(
      "slurm",
      {{with({{"SLURM_PROCID", "4"}}, kSrun),
        "SLURM_PROCID below SLURM_STEP_NUM_TASKS, got SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=4"},
       {with({{"SLURM_LOCALID", "2"}}, kSrun),
        "SLURM_LOCALID below SLURM_STEP_TASKS_PER_NODE, got SLURM_LOCALID=2, "
        "SLURM_STEP_TASKS_PER_NODE=2(x2)"},
       {with({{"SLURM_NODEID", "2"}}, kSrun),
        "SLURM_NODEID below SLURM_STEP_NUM_NODES, got SLURM_NODEID=2, SLURM_STEP_NUM_NODES=2"},
       {with({{"SLURM_STEP_TASKS_PER_NODE", "3,2"}}, kSrun), lists("3,2", "2")},
       {with({{"SLURM_STEP_TASKS_PER_NODE", "1,1,2"}}, kSrun), lists("1,1,2", "2")},
       {with({{"SLURM_STEP_NUM_NODES", "3"}}, kSrun), lists("2(x2)", "3")}});
  expect_errors(
      "env",
      {{with({{"RANK", "4"}}, kByHand), "RANK below WORLD_SIZE, got RANK=4, WORLD_SIZE=4"},
       {with({{"PET_NPROC_PER_NODE", "2"}}, kPyTorchJob),
        "torchrun to start several processes in a pod, as in `torchrun --no-python PROGRAM`, got "
        "PET_NPROC_PER_NODE=2 without it"}});
}

TEST(Launcher, WhatIsNoNumberPortHostOrListIsAnError) {
  for (const char* text : {"-1", "x", "1x", " 1", "+1", "0x1", "1.5", "99999999999", "65537"}) {
    const std::string numbers = "a whole number from 0 to 65536, got ";
    expect_errors("torchrun",
                  {{with({{"RANK", text}}, kTorchrun), numbers + "RANK=" + text},
                   {with({{"WORLD_SIZE", text}}, kTorchrun), numbers + "WORLD_SIZE=" + text},
                   {with({{"LOCAL_RANK", text}}, kTorchrun), numbers + "LOCAL_RANK=" + text}});
    expect_errors("hydra", {{with({{"PMI_SIZE", text}}, kHydra), numbers + "PMI_SIZE=" + text}});
    expect_errors("env", {{{{"RANK", text}}, numbers + "RANK=" + text}});
  }
  EXPECT_EQ(error({{"RANK", "\x1b[2J"}}),
            "[launcher] expected a whole number from 0 to 65536, got RANK=\\x1b[2J (env)");
  for (const char* text : {"0", "65536", "port", "-29500"}) {
    const std::string port = std::string("a whole number from 1 to 65535, got MASTER_PORT=") + text;
    expect_errors("torchrun", {{with({{"MASTER_PORT", text}}, kTorchrun), port}});
    expect_errors("env", {{with({{"MASTER_PORT", text}}, kByHand), port}});
  }
  for (const char* text : {"h 1", "tcp://h1", "h1/x", "h1+15", "h1,h2"}) {
    const std::string host = std::string("a host in MASTER_ADDR, got MASTER_ADDR=") + text;
    expect_errors("torchrun", {{with({{"MASTER_ADDR", text}}, kTorchrun), host}});
    expect_errors("env", {{with({{"MASTER_ADDR", text}}, kByHand), host}});
  }
  for (const char* text : {",h2", "h[1-2", "h[]", "[,2]", "h 1", "h1]"}) {
    expect_errors(
        "slurm", {{with({{"SLURM_STEP_NODELIST", text}}, kSrun),
                   std::string("a host in SLURM_STEP_NODELIST, got SLURM_STEP_NODELIST=") + text}});
  }
  for (const char* text : {"2(x2", "2x2", "2(x)", "(x2)", "2(x2),", ",4", "0(x2),4", "4(x0)",
                           "2(x-2)", "-2,6", "2 (x2)", "2(x99999999999)", "2(x65536),1", "65537"}) {
    expect_errors("slurm", {{with({{"SLURM_STEP_TASKS_PER_NODE", text}}, kSrun),
                             std::string("SLURM_STEP_TASKS_PER_NODE of SLURM_STEP_NUM_TASKS and "
                                         "SLURM_STEP_NUM_NODES, got SLURM_STEP_TASKS_PER_NODE=") +
                                 text + ", SLURM_STEP_NUM_TASKS=4, SLURM_STEP_NUM_NODES=2"}});
  }
}

// Nobody is taken for alone, or for another launcher's, because one variable is missing.
TEST(Launcher, HalfOfWhatOneSetsIsAnError) {
  expect_errors(
      "torchrun",
      {{without("RANK", kTorchrun),
        "RANK with WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_RANK=1, "
        "GROUP_WORLD_SIZE=2, got none"},
       {{{"TORCHELASTIC_RUN_ID", "none"}, {"RANK", "1"}}, "WORLD_SIZE with RANK=1, got none"},
       {{{"TORCHELASTIC_RUN_ID", "none"}}, "RANK, got none"}});
  const auto names_it = [](const Environment& all, const std::string& name) {
    EXPECT_TRUE(error(without(name, all)).starts_with("[launcher] expected " + name)) << name;
  };
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                           "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    names_it(kTorchrun, name);
  }
  for (const char* name :
       {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"}) {
    names_it(kSrun, name);
  }
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    names_it(kMpirun, name);
    names_it(with(kMpirun, kSrun), name);
  }
  for (const char* name : {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}) {
    names_it(kHydra, name);
  }
  for (const auto& [name, value] : kMvapich) names_it(kMvapich, name);
  for (const auto& [name, value] : kByHand) names_it(kByHand, name);
  expect_errors("hydra", {{{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}},
                           "MPI_LOCALNRANKS with PMI_RANK=1, PMI_SIZE=4, got none"}});
  expect_errors("env", {{{{"RANK", "1"}}, "WORLD_SIZE with RANK=1, got none"},
                        {{{"WORLD_SIZE", "4"}}, "RANK with WORLD_SIZE=4, got none"},
                        {with({{"LOCAL_RANK", "0"}}, kByHand),
                         "LOCAL_WORLD_SIZE with RANK=2, WORLD_SIZE=4, LOCAL_RANK=0, got none"}});
}

// Ports of two jobs on one host differ, as far as anything that all of their processes know does.
TEST(Launcher, JobsOfOneHostMeetApart) {
  const auto address = [](const Environment& environment) {
    return find_launch(environment, Choice::kAuto).address;
  };
  EXPECT_EQ(address(with({{"MASTER_PORT", "29501"}}, kTorchrun)), "tcp:h1:22257+15");
  EXPECT_EQ(address(with({{"USER", "bob"}}, kTorchrun)), "tcp:h1:20549+15");
  EXPECT_EQ(address(without("USER", with({{"LOGNAME", "bob"}}, kTorchrun))), "tcp:h1:20549+15");
  EXPECT_EQ(address(without("USER", kTorchrun)), "tcp:h1:25594+15");
  EXPECT_EQ(address(with({{"TORCHELASTIC_RUN_ID", "r7"}}, kTorchrun)), "tcp:h1:25671+15");
  EXPECT_EQ(address(with({{"MASTER_ADDR", "fe80::1%eth0"}}, kByHand)), "tcp:fe80::1%eth0:29500");
  for (int port = 1; port <= 65535; port += 7) {
    const std::string text =
        address(with({{"MASTER_PORT", std::to_string(port)}}, kTorchrun)).substr(7);
    const int first = std::stoi(text);
    EXPECT_TRUE(first >= 20000 && first + 15 < 32768) << text;  // below the ephemeral ones
  }
}

TEST(Launcher, TheInterfaceOfGlooIsTheOneThatPyTorchWouldTake) {
  const auto launch = [](const char* interfaces, const Environment& base) {
    return find_launch(with({{"GLOO_SOCKET_IFNAME", interfaces}}, base), Choice::kAuto);
  };
  EXPECT_EQ(launch("eth1", kTorchrun).interface, "eth1");
  EXPECT_EQ(launch("eth1", kTorchrun).notes, std::vector<std::string>());
  const Launch several = launch("eth1,eth2", kTorchrun);
  EXPECT_EQ(several.interface, "eth1");
  EXPECT_EQ(several.notes,
            std::vector<std::string>{"of the interfaces in GLOO_SOCKET_IFNAME=eth1,eth2 only the "
                                     "first is used: eth1"});
  EXPECT_EQ(launch("eth1,eth2", {}), Launch());
}

TEST(Launcher, SaysInOneLine) {
  EXPECT_EQ(kOfTorchrun.str(), "torchrun, process 3 of 4 (1 of 2 on host 1 of 2)");
  EXPECT_EQ(kOfHydra.str(), "hydra, process 5 of 8 (1 of 4 on its host)");
  EXPECT_EQ(Launch().str(), "threads, process 0 of 1");
}

TEST(Launcher, ItsVariablesAreKnown) {
  for (const Environment* all : {&kHydra, &kMvapich, &kByHand}) {
    for (const auto& [name, value] : *all) EXPECT_EQ(is_launch_variable(name), name != "PMI_FD");
  }
  EXPECT_TRUE(is_launch_variable("GROUP_WORLD_SIZE"));
  EXPECT_TRUE(is_launch_variable("SLURM_STEP_TASKS_PER_NODE"));
  for (const char* name : {"USER", "SLURM_NTASKS", "ROLE_RANK"}) {
    EXPECT_FALSE(is_launch_variable(name)) << name;
  }
}

TEST(LauncherChoice, EachHasItsName) {
  for (const auto& [name, choice] : kLauncherChoices) EXPECT_EQ(name_of(choice), name);
  EXPECT_EQ(name_of(Choice::kOpenMpi), "openmpi");
}

}  // namespace
}  // namespace tessera::tools
